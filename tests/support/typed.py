"""`concur` as a person types it, in this process: what it prints, and the one line of a refusal.

Words are one text, which is split, or given one by one.
"""

import json
import re

from click.testing import CliRunner

from flows.cli.main import main


def invoked(*words):
    words = words[0].split() if len(words) == 1 else map(str, words)
    return CliRunner().invoke(main, list(words))


def typed(*words):
    """What a command prints that ends well, without a word on stderr."""
    done = invoked(*words)
    assert done.exit_code == 0 and not done.stderr, (done.output, done.exception)
    return done.stdout


def data_of(*words):
    """The data that a command prints with `--json`; its progress may be on stderr."""
    words = words[0].split() if len(words) == 1 else words
    done = invoked(*words, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def refused(*words):
    """The one line of a command that cannot use its input."""
    done = invoked(*words)
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == "" and re.fullmatch(r"error: [^\n]*\n", done.stderr), done.output
    return done.stderr
