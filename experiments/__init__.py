"""One module per figure: `python -m experiments.NAME` prints a table and writes NAME.json and .png.

Both go to out/results, or to --results_dir. Those that the project publishes are in results/.
"""
