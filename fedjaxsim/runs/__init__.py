"""Runs: their settings, how they are checked, assembled and executed, and their files.

A TOML file or flags become results in this order: `settings_files` reads values; `settings`
composes the table of a run's keys from its `parts`; `build` checks a run, whose population and
simulation `assemble` makes; `execute` runs it, or a stage after another run, and writes a
`directory`. `sweep_runs` resolves many runs, and `sweep_results` holds what they write.
"""
