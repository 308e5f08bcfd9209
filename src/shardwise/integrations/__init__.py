"""Other people's trainers: each module needs the package that it is named for, and patches nothing of it."""
