"""Parts of readers that are common to the formats: facts of files, rows in Arrow, row counts, errors of stores."""
