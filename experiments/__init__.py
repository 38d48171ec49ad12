"""The experiments: `python -m experiments.NAME` measures, and `--help` says what.

Most print a table and write NAME.json and NAME.png to out/results/, or to --results_dir. bench,
loss_curves, play and pretrained write what their help says; peers, report and timing are parts of
others.
"""
