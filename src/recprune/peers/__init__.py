"""What people use instead of recprune: interchangeable siblings behind one small interface."""
