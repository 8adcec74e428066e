"""Started by tools/gpu_proof.sh, which finds the interpreter and the wheels."""

from proof.command import main

if __name__ == "__main__":
    main()
