"""What a run leaves behind: tables on the terminal, JUnit XML, the run record. No torch."""
