"""Problems: records, files, benchmarks, and the mini-world's tasks. Imports none of our folders."""
