"""What a run will need and how fast it will go, before it runs: pure functions of sizes and measured constants."""
