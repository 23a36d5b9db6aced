"""Runs: their settings, how they are checked, assembled and executed, and their files.

A TOML file or flags become results in this order: `settings_files` reads values; `settings`
composes the type of a run's settings from the `fields` of its `parts`; `build` checks a run, with
`assemble` for its population and simulation and `validation` for its data; `execute` runs it and
writes a `directory`. `stages` starts a run from another one, and `sweep_runs` resolves many.
"""
