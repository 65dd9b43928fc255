#!/usr/bin/env bash
# Create the Python environment of this project, and print the path of its interpreter on standard output.
#
#   bash tools/prepare_environment.sh          packages for preprocessing (with the fast back end), training, conversion
#   bash tools/prepare_environment.sh --dev    also packages for tests, ruff and mypy
#
# The script uses the active virtual environment, or conda environment other than base. Without one it uses .venv at the
# root of the repository, and creates it if necessary. It installs torch first, at the version in constraints.txt, but
# keeps a torch that is already installed. A second call returns in less than a second.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$repository"

say() { printf 'environment: %s\n' "$*" >&2; }
fail() { printf 'environment: %s\n' "$*" >&2; exit 69; }

extras="[fast]" stamp_name=megatron_neobert_installed
case "$*" in
"") ;;
--dev) extras="[dev]" stamp_name=megatron_neobert_installed_dev ;;
--help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
*) printf 'environment: unknown arguments %s; the only one is --dev\n' "$*" >&2; exit 2 ;;
esac

# Print "3.11.7 suitable" or "3.14.0 unsuitable"; fail if the command is not a working Python.
describe_python() {
    "$1" -c 'import sys
version = sys.version_info
print("%d.%d.%d" % version[:3], "suitable" if (3, 11) <= version[:2] <= (3, 13) else "unsuitable")' 2>/dev/null
}

# Print the first Python 3.11 to 3.13 on the PATH that can create virtual environments.
find_python() {
    local candidate description versions="" without_venv=""
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        description=$(describe_python "$candidate") || continue
        versions+="${versions:+, }$candidate is ${description% *}"
        [[ $description == *" suitable" ]] || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        fail "$without_venv cannot create virtual environments: its modules venv and ensurepip are not installed." \
            "Install them (Debian and Ubuntu: the package $without_venv-venv) and start again."
    fi
    fail "no Python 3.11 to 3.13 on the PATH (${versions:-no python at all}). Install one of them, or activate an" \
        "environment that has one, and start again."
}

# 1. Choose the environment.
if [[ -n ${VIRTUAL_ENV-} ]]; then
    prefix=$VIRTUAL_ENV active=yes
elif [[ -n ${CONDA_PREFIX-} && ${CONDA_DEFAULT_ENV-} != base ]]; then
    prefix=$CONDA_PREFIX active=yes
else
    prefix=$repository/.venv active=no
fi
python=$prefix/bin/python
log=$prefix/megatron_neobert_install.log
stamp=$prefix/$stamp_name

# 2. Return if it is complete. The stamp has the path of the repository and a checksum of the requirements.
complete_stamp="$repository $(cat pyproject.toml constraints.txt | cksum)"
for file in "$stamp" "$prefix/megatron_neobert_installed_dev"; do
    if [[ -x $python && -f $file && $(<"$file") == "$complete_stamp" ]]; then
        printf '%s\n' "$python"
        exit 0
    fi
done
# A virtual environment contains its own path, so it must be created again after the repository has moved.
moved=no
if [[ $active == no && -f $stamp && $(<"$stamp") != "$repository "* ]]; then moved=yes; fi
rm -f "$prefix"/megatron_neobert_installed*

# 3. Create it, or check that it can be used.
if [[ $active == no ]] && { [[ $moved == yes ]] || ! "$python" -m pip --version >/dev/null 2>&1; }; then
    base=$(find_python)
    say "creating .venv with Python $("$base" -c 'import platform; print(platform.python_version())')"
    "$base" -m venv --clear "$prefix" >&2 || fail "$base -m venv failed; its message is above."
fi
description=$(describe_python "$python") || fail "$prefix has no working bin/python. Deactivate it, or create it again."
if [[ $description != *" suitable" ]]; then
    fail "$prefix has Python ${description% *}, and this project needs 3.11 to 3.13." \
        "$([[ $active == yes ]] && echo "Deactivate it or activate another" || echo "Delete it") and start again."
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$prefix has no pip; install pip into it and start again."

# 4. Install. torch is first, so that the packages that depend on it use this build.
: >"$log" || fail "cannot write to $prefix; activate an environment that you can change."
report_pip() { # every nine seconds the latest line of its log, once, or the package that it is installing
    local line previous='' package newest
    while sleep 9 >/dev/null 2>&1; do
        line=$(tail -n 1 "$log")
        if [[ $line == *"Installing collected packages"* || $line == *uninstall* ]]; then # its last lines for minutes
            newest=''
            for package in "$prefix"/lib/python3*/site-packages/[a-zA-Z]*/; do
                if [[ -z $newest || $package -nt $newest ]]; then newest=${package%/}; fi
            done
            newest=${newest##*/}
            line="installing ${newest%%-*}"
        fi
        if [[ $line == "$previous" ]]; then say "$SECONDS s"; else say "$SECONDS s: ${line:0:90}"; fi
        previous=$line
    done
}
install() {
    local status=0
    report_pip >/dev/null &
    trap "kill $! 2>/dev/null" EXIT
    "$python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 || status=$?
    kill $!
    wait $! 2>/dev/null || true
    trap - EXIT
    if [[ $status == 0 ]]; then return; fi
    tail -n 15 "$log" >&2
    fail "pip could not install $description; the end of its log is above, and the whole log is $log."
}
constraints=$prefix/megatron_neobert_constraints.txt
installed_torch=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null || true)
if [[ -n $installed_torch ]]; then
    say "keeping torch $installed_torch"
    sed "s/^torch==.*/torch==$installed_torch/" constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
    description=$(sed -n 's/^torch==/torch /p' constraints.txt)
    say "installing $description, which takes minutes; pip writes to $log"
    install --constraint "$constraints" torch
fi
description="megatron-neobert$extras"
say "installing $description and its dependencies, which takes minutes; pip writes to $log"
install --constraint "$constraints" --editable ".$extras"
if [[ $extras == "[dev]" ]]; then
    # Only the Python sources, in a folder that is not on the path: importing Transformer Engine without its compiled
    # part must fail.
    description="the sources of Transformer Engine"
    sources=$prefix/transformer_engine_sources
    install --constraint "$constraints" --no-deps --upgrade --target "$sources" transformer-engine
fi

printf '%s\n' "$complete_stamp" >"$stamp"
say "ready in ${SECONDS} s: $prefix"
printf '%s\n' "$python"
