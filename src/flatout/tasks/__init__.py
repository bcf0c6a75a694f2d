"""How well a model answers: log-likelihoods, tasks from files, their scores, and the tasks of other programs."""
