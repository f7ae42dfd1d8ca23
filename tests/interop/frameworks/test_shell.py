"""Scripts of bash as people write them, read without being run."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto_interop.frameworks.shell import commands, parameters
from stretto_interop.frameworks.shell_values import unknown_in


def said(text: str, *words: str, **variables: str) -> list[str]:
    """The words of every command, joined."""
    known = {**parameters(words), **variables}
    return [" ".join(command.words) for command in commands(text, "run.sh", known)]


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ('[ -z "$B" ] && B=5\necho $B', "5"),
        ('A=1\n[ -n "$A" ] || A=7\necho $A', "1"),
        ("A=2\ncd /x || A=1\necho $A", "2"),
        ('A=3\nif [[ "$A" == "2" ]] || [ "$A" -eq 3 ]; then B=yes; else B=no; fi\necho $B', "yes"),
        ('A=3\nif [[ "$A" == "3" ]] && [ "$A" -eq 2 ]; then B=yes; else B=no; fi\necho $B', "no"),
        ('A=1; C=c\nif [[ "$A" == "1" && -n "$C" ]]; then D=both; fi\necho $D', "both"),
        ('A=1\nif [[ "$A" == "2" || -z "$A" ]]; then D=one; else D=none; fi\necho $D', "none"),
        ("if [ ! -f x ]; then echo no pretrain_gpt.py; exit 1; fi\necho on", "on"),
        ("while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2;; esac; done\nTP=${TP:-4}\necho $TP", "4"),
        ("for host in a b; do ssh $host date; done\necho on", "on"),
        ("cat <<EOT > ds.json\n{ 'a': 1, }\nEOT\necho on", "on"),
        ("python x.py --a 1 > log.txt 2>&1 < /dev/null | tee log", "tee log"),
    ],
)
def test_the_last_command(text: str, out: str) -> None:
    last = said(text)[-1]
    assert last.removeprefix("echo ") == out


OWN = """TP=2
PP=1
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tp) TP="$2"; shift 2 ;;
    --pp=*)  # joined
      PP="${1#*=}"
      shift
      ;;
    -b|--bf16) ARGS=(--bf16); shift ;;
    *) usage; exit 1 ;;
  esac
done
echo $TP $PP ${ARGS[@]} $#
"""
LETTERS = """TP=2
while getopts "t:b" opt; do
  case $opt in
    t) TP=$OPTARG ;;
    b) BF=1 ;;
  esac
done
shift $((OPTIND-1))
echo $TP ${BF:-0}
"""


@pytest.mark.parametrize(
    ("text", "words", "out"),
    [
        (OWN, "", "2 1 0"),
        (OWN, "--tp 8 --pp=4 -b", "8 4 --bf16 0"),
        (LETTERS, "", "2 0"),
        (LETTERS, "-b -t 8", "8 1"),
        (LETTERS, "-bt8", "8 1"),
        ("A=x.tar.gz; echo ${A%.*} ${A%%.*} ${A#*.} ${A##*.} ${A#y}", "", "x.tar x tar.gz gz x.tar.gz"),
    ],
)
def test_options_of_the_script_itself(text: str, words: str, out: str) -> None:
    assert said(text, *words.split())[-1] == f"echo {out}"


def test_a_word_that_the_script_refuses() -> None:
    with pytest.raises(StrettoError, match=r"run\.sh:3: the script ends at '--tq'"):
        said(OWN, "--tq", "8")


def test_other_loops_are_no_options_and_lines_keep_their_numbers() -> None:
    with pytest.raises(StrettoError, match=r"run\.sh:1: while is not read"):
        said("while [[ $# -gt 0 ]]; do case $1 in a) ARGS+=(--a) ;; esac; done", "a")
    with pytest.raises(StrettoError, match=r"run\.sh:15: for is not read"):
        said(f"{OWN}for i in 1 2; do ARGS=(--a); done", "--tp", "8")


def test_what_is_redirected_is_no_argument() -> None:
    assert said("python x.py --a 1 > log.txt 2>&1 &> all 2> errors")[0] == "python x.py --a 1"


def test_positional_words_are_those_behind_the_script() -> None:
    text = 'echo "$1" ${2:-none} "${3:-none}" $#\npython x.py "$@"'
    assert said(text, "a", "b c") == ["echo a b c none 2", "python x.py a b c"]
    assert said('python x.py "$@" --b') == ["python x.py --b"]


def test_a_text_and_a_document_hold_commands() -> None:
    options = 'options="--lr 1e-4 \\\n  --bf16"\nrun="python pretrain_gpt.py ${options}"\n'
    once = "python pretrain_gpt.py --lr 1e-4 --bf16"
    assert said(f'{options}srun -l --nodes=4 bash -c "${{run}}" > log')[-1] == f"srun -l --nodes=4 {once}"
    assert said(f"{options}srun bash <<EOF\n  $run\nEOF\n")[-1] == f"srun bash {once}"
    assert said(f"{options}cat > job.sh <<EOF\n$run\nEOF\nsbatch job.sh")[0] == once
    plain = "A=1\nbash <<'EOF'\necho \"$A\" --b\nEOF\n"
    assert said(plain) == ["bash echo 1 --b"]


def test_what_only_running_would_tell_is_unknown() -> None:
    text = "if [ -d /scratch ]; then DIR=/scratch; fi\necho $DIR"
    assert unknown_in(said(text)[-1]) == "DIR"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if [ -d /x ]; then ARGS+=(--bf16); fi", "nothing tells whether `if [ -d /x ]` holds"),
        ('[ -d /x ] && ARGS="--bf16"', "nothing tells whether what stands before && or || holds"),
        ("for i in 1 2; do ARGS=(--bf16); done", "for is not read"),
        ("for i in 1 2; do python pretrain_gpt.py; done", "for is not read"),
        ("cat <<EOF\nnever ended", "a document <<EOF that does not end"),
    ],
)
def test_arguments_that_may_be_there_or_not_are_an_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        said(text)
    assert message.replace("`if ", "`") in caught.value.message.replace("`if ", "`")


TRAIN = 'train() {\n  local EXTRA=--x\n  torchrun pretrain_gpt.py "$@" $1 $EXTRA\n}\n'


@pytest.mark.parametrize(
    ("text", "out"),
    [
        (f"{TRAIN}train --lr '1 e'", "torchrun pretrain_gpt.py --lr 1 e --lr --x"),
        (f"EXTRA=--y\n{TRAIN}train --lr\necho $EXTRA $1", "echo --y mine"),
        ("function f { echo $1; }; f a", "echo a"),
        ("f () { A=$1; return; A=5; }\nf 3\necho $A", "echo 3"),
        ('f() { if [ "$1" = a ]; then\n{ A=1; }\nfi; }\nf a\necho $A', "echo 1"),
        ("f() { A=5; }\nA=1\necho $A", "echo 1"),
        ("A=1; [ 1 -eq 2 ] && { echo no; A=5; }\necho $A", "echo 1"),
        ("A=1; [ 1 -eq 2 ] || { echo no; A=5; }\necho $A", "echo 5"),
        ("A=1; if [ $A = 1 ]; then [ $A = 1 ] && [ $A = 2 ] && A=3; A=4; fi\necho $A", "echo 4"),
        ("set -- a b; shift; echo $@", "echo b"),
        ("set -ex; echo $@", "echo mine"),
        ('eval "A=3"; echo $A', "echo 3"),
        (": ${A:=4}; echo $A", "echo 4"),
        ("echo $((-7 / 2)) $((-7 % 3))", "echo -3 -1"),
        ('A="x\\"y"; cat <<EOF > f\n\\"$A\nEOF\necho $A', 'echo x"y'),
    ],
)
def test_functions_and_builtins_do_what_they_do_in_bash(text: str, out: str) -> None:
    assert said(text, "mine")[-1] == out


@pytest.mark.parametrize(
    "text",
    [
        'for B in a b; do [ -z "$B" ] && A=1; done',
        'A=$(nvidia-smi -L | wc -l); if [ -z "$A" ]; then A=8; fi',
        "A=3; [[ $X == y* ]] && A=1",
        "A=3; read A",
        "A=3; let A=A+1",
        "A=3; A[1]=4",
        "A=3; unset A",
        "f() { A=4; }; A=3; if [ -d /x ]; then f; fi",
    ],
)
def test_what_is_set_where_nothing_tells_is_unknown(text: str) -> None:
    assert unknown_in(said(f"{text}\necho $A")[-1]) is not None


def test_a_command_with_blanks_is_one_unknown() -> None:
    words = list(commands("N=$(nvidia-smi -L | wc -l)\ntorchrun --n $N", "run.sh"))[-1].words
    assert (len(words), unknown_in(words[2])) == (3, "$(nvidia-smi -L | wc -l)")


def test_what_a_script_leaves_to_others_is_noted() -> None:
    notes = list[str]()
    list(commands('source env.sh\n[ -z "$A" ] && exit 1\necho on', "run.sh", notes=notes))
    assert notes == [
        "run.sh:1: env.sh is not read: what it sets is not known",
        "run.sh:2: the script ends there as it is started, and is read on: exit 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('echo "a ` b"', "run.sh:1: a quote ` that does not end"),
        ("echo on\necho a\0b", "run.sh:2: a NUL byte"),
        ("echo ${A:-'x}", "run.sh:1: a quote ' that does not end"),
        ("x" * (1 << 20) + "x", "run.sh has 1,048,577 characters"),
        ("A=xxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A\n" * 9, "more than 4,194,304 characters"),
        ("A=(x)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40, "more than 4,194,304 characters"),
        ("echo " + "${A:-" * 3000 + "}" * 3000, "in each other, over 40 deep"),
        ("f() { f; }\nf", "in each other, over 40 deep"),
        ('A=\'eval "$A"\'\neval "$A"', "in each other, over 40 deep"),
        ("\n".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}" for i in range(1, 35)) + "\nf34", "characters"),
        ("A=$((" + "9*" * 400 + "9))", "is not read"),
        ("f() {\necho", "the function f does not end"),
        ("f() ( echo )", "a function without { ... } is not read"),
    ],
)
def test_a_script_that_is_none_is_one_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        said(text)
    assert message in caught.value.message
    assert len(str(caught.value)) < 4300
