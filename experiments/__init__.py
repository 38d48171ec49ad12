"""One module per figure: `python -m experiments.NAME`, which prints a table and writes results/NAME.json and .png."""
