#!/usr/bin/env bash
# Makes the Python environment of this project and prints the path of its interpreter on standard output.
#
#   bash tools/prepare_environment.sh          what training, conversion and evaluation need
#   bash tools/prepare_environment.sh --dev    also what the tests, ruff and mypy need, with Transformer Engine's Python
#
# An active virtual environment (or conda environment other than base) is used as it is; otherwise .venv at the root of
# the repository, made when absent. torch is installed first, at the version in constraints.txt, unless the environment
# has one already: that one is then kept. A second call finds its stamp and ends in well under a second.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$repository"

say() { printf 'environment: %s\n' "$*" >&2; }
fail() { printf 'environment: %s\n' "$*" >&2; exit 69; }

extras=""
case "${1-}" in
"") ;;
--dev) extras="[dev]" ;;
--help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
*) printf 'environment: unknown argument %s; the only one is --dev\n' "$1" >&2; exit 2 ;;
esac

# Prints "3.11.7 suitable" or "3.14.0 unsuitable"; fails where the command is no working Python.
describe_python() {
    "$1" -c 'import sys
version = sys.version_info
print("%d.%d.%d" % version[:3], "suitable" if (3, 10) <= version[:2] <= (3, 13) else "unsuitable")' 2>/dev/null
}

# The first Python 3.10 to 3.13 on the PATH that can make virtual environments.
find_python() {
    local candidate description found="" without_venv=""
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        description=$(describe_python "$candidate") || continue
        found+="${found:+, }$candidate is ${description% *}"
        [[ $description == *" suitable" ]] || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        fail "$without_venv cannot make virtual environments, its modules venv and ensurepip are not installed." \
            "Install them (Debian and Ubuntu: the package $without_venv-venv) and start again."
    fi
    fail "no Python 3.10 to 3.13 on the PATH (${found:-no python at all}). Install one of them, or activate an" \
        "environment that has it, and start again."
}

# 1. Which environment?
if [[ -n ${VIRTUAL_ENV-} ]]; then
    prefix=$VIRTUAL_ENV active=yes
elif [[ -n ${CONDA_PREFIX-} && ${CONDA_DEFAULT_ENV-} != base ]]; then
    prefix=$CONDA_PREFIX active=yes
else
    prefix=$repository/.venv active=no
fi
python=$prefix/bin/python
log=$prefix/megatron_neobert_install.log
stamp=$prefix/megatron_neobert_installed${extras:+_dev}

# 2. Is it right already? The stamp names the repository and the exact text of what was asked for.
wanted="$repository $(cat setup.py constraints.txt | cksum)"
for complete in "$stamp" "$prefix/megatron_neobert_installed_dev"; do
    if [[ -x $python && -f $complete && $(<"$complete") == "$wanted" ]]; then
        printf '%s\n' "$python"
        exit 0
    fi
done
moved=no # the commands inside a virtual environment name its path, so it does not survive a move
if [[ $active == no && -f $stamp && $(<"$stamp") != "$repository "* ]]; then moved=yes; fi
rm -f "$prefix"/megatron_neobert_installed*

# 3. Make it, or check that it can be used.
if [[ $active == no ]] && { [[ $moved == yes ]] || ! "$python" -m pip --version >/dev/null 2>&1; }; then
    base=$(find_python)
    say "making .venv with Python $("$base" -c 'import platform; print(platform.python_version())')"
    "$base" -m venv --clear "$prefix" >&2 || fail "$base -m venv failed; its message stands above."
fi
description=$(describe_python "$python") || fail "$prefix has no working bin/python. Deactivate it, or make it anew."
if [[ $description != *" suitable" ]]; then
    fail "$prefix has Python ${description% *}, and this project needs 3.10 to 3.13." \
        "$([[ $active == yes ]] && echo "Deactivate it or activate another" || echo "Delete it") and start again."
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$prefix has no pip; install pip into it and start again."

# 4. Install. torch first, so that packages that depend on it take this build.
: >"$log" || fail "cannot write to $prefix; activate an environment that you may change."
install() {
    "$python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    fail "pip could not install $description; the end of its log stands above, all of it is in $log."
}
constraints=$prefix/megatron_neobert_constraints.txt
installed_torch=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null || true)
if [[ -n $installed_torch ]]; then
    say "keeping torch $installed_torch"
    sed "s/^torch==.*/torch==$installed_torch/" constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
    description=$(sed -n 's/^torch==/torch /p' constraints.txt)
    say "installing $description"
    install --constraint "$constraints" torch
fi
description="megatron-neobert$extras"
say "installing $description and its dependencies"
install --constraint "$constraints" --editable ".$extras"
if [[ -n $extras ]]; then
    # Only its Python, beside the other packages: a Transformer Engine that cannot compute must not be importable.
    description="the sources of Transformer Engine"
    sources=$prefix/transformer_engine_sources
    install --constraint "$constraints" --no-deps --upgrade --target "$sources" transformer-engine
fi

printf '%s\n' "$wanted" >"$stamp"
say "ready in ${SECONDS} s: $prefix"
printf '%s\n' "$python"
