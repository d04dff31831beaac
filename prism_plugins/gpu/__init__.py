"""What a slice needs of a real GPU: sensors, the memory cap, and the recorder of its iterations."""
