"""Expert parallelism: each rank of ``ep`` holds some experts of every mixture, and tokens go to those that they chose.

``route`` says which token goes where and moves it, ``layer`` finds mixtures, divides them and is their forward.
"""
