"""docs/paper.md from the table.json of a study."""
