"""What is away from the device between its uses: in host memory, or in files read ahead, written behind."""
