"""What every recipe needs: results files, tables, plots, scores, resumable steps, checkpoints."""
