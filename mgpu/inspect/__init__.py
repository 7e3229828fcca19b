"""Looking at a training from outside: do its layouts agree, how do its runs compare."""
