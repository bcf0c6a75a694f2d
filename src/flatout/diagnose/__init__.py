"""What is wrong before training: the doctor. Import from the modules; none imports torch at its top."""
