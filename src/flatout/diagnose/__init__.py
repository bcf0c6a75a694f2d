"""What is wrong, before or after the fact: the doctor. Import from the modules; none imports torch at its top."""
