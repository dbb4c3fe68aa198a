"""What is compiled for a GPU, or interpreted: functions of triton, and how they are launched."""
