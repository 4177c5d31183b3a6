"""The trusted side: builds, starts and asks processes, and decides the verdict. Never imports
`candidate` or `reference`.
"""
