"""What `pip install` makes of a package with one module and its entry points."""


def install(folder, name, code, group, entry_points):
    """A module NAME.py in a folder that is imported from, of the distribution concur-NAME."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"concur_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: concur-{name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
