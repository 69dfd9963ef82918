//! Pages whose commands are typed as they stand, and whose outputs are compared.
//!
//! A page is Markdown. Each fenced block of it is one of
//! * `console`: lines after `$ ` are commands, lines after `> ` go on with one, and the others are what is seen;
//! * any block after a line `<!-- not run: REASON -->`.
//!
//! All commands of a page are typed into one shell, in their order. What is seen may differ from the page in what
//! differs between two runs ([`normalize`]): numbers with their units, how wide columns are, bars. A command that fails
//! is followed by `echo $?` on the page.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use regex::Regex;

use crate::Sandbox;
use crate::command::{PROGRAM_LIMIT, wait_until};

/// Set, and not empty: pages are written anew with what is seen, instead of compared.
pub const RECORD: &str = "FIRN_RECORD";

/// What is on the page for the home directory of the sandbox.
const HOME_ON_PAGE: &str = "/home/you";
/// What is on the page for its runtime directory.
const RUNTIME_ON_PAGE: &str = "/dev/shm/firn-1000";
/// Ends the output of a command; the exit status follows.
const END_MARK: &str = "--- this command has ended with";

/// A page of the documentation.
#[derive(Debug)]
pub struct Page {
    path: PathBuf,
    lines: Vec<String>,
    steps: Vec<Step>,
}

/// A command on a page.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// As it is typed, without prompts.
    pub command: String,
    /// Lines of the page that show what is seen; indexes from 0.
    pub seen: Range<usize>,
}

/// Longer than the kernel takes to close the files of a program that was killed.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

impl Page {
    /// Reads a page; panics where a block is neither run nor marked.
    #[track_caller]
    pub fn read(path: &Path) -> Self {
        let text =
            fs::read_to_string(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let steps = find_steps(&lines).unwrap_or_else(|e| panic!("{}:{e}", path.display()));
        Self {
            path: path.to_owned(),
            lines,
            steps,
        }
    }

    /// Types the commands of the page in the home directory of `sandbox`, and compares what is seen, or records it.
    #[track_caller]
    pub fn type_commands(&self, sandbox: &Sandbox) {
        let records = std::env::var_os(RECORD).is_some_and(|value| !value.is_empty());
        let mut shell = Shell::start(sandbox);
        let mut faults = Vec::new();
        let mut seen_lines = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let (mut seen, mut status) = shell.run(&step.command);
            // The kernel may tell firnd that a killed program's files are closed after the shell has seen its end.
            let until = Instant::now() + RELEASE_LIMIT;
            while !records
                && step.command.starts_with("firn ls ")
                && !is_alike(&self.lines[step.seen.clone()], &seen)
                && Instant::now() < until
            {
                (seen, status) = shell.run(&step.command);
            }
            let asks_for_status = |next: &Step| next.command.trim() == "echo $?";
            if status != 0 && !self.steps.get(index + 1).is_some_and(asks_for_status) {
                faults.push(self.fault(step, &format!("ended with {status}"), &seen));
            } else if !records && !is_alike(&self.lines[step.seen.clone()], &seen) {
                faults.push(self.fault(step, "shows something else", &seen));
            }
            seen_lines.push(seen);
        }
        assert!(
            faults.is_empty(),
            "{} does not show what is seen. Is it right? Then write the page anew: {RECORD}=1 and this test.\n{}",
            self.path.display(),
            faults.join("\n")
        );
        if records {
            fs::write(&self.path, self.with_seen(&seen_lines)).expect("write the page anew");
        }
    }

    fn fault(&self, step: &Step, what: &str, seen: &[String]) -> String {
        format!(
            "--- {}:{}: `{}` {what}\n--- on the page\n{}\n--- seen\n{}\n",
            self.path.display(),
            step.seen.start,
            step.command,
            self.lines[step.seen.clone()].join("\n"),
            seen.join("\n")
        )
    }

    /// The text of the page with these lines as what is seen after each command.
    fn with_seen(&self, seen: &[Vec<String>]) -> String {
        let mut text = String::new();
        let mut next = 0;
        let mut add = |lines: &[String]| {
            for line in lines {
                text.push_str(line);
                text.push('\n');
            }
        };
        for (step, seen) in self.steps.iter().zip(seen) {
            add(&self.lines[next..step.seen.start]);
            add(seen);
            next = step.seen.end;
        }
        add(&self.lines[next..]);
        text
    }
}

/// The commands of all blocks that are run; an error names the line of a block that is neither run nor marked.
fn find_steps(lines: &[String]) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut index = 0;
    let mut mark = None;
    while index < lines.len() {
        let line = lines[index].trim();
        let Some(language) = line.strip_prefix("```") else {
            if !line.is_empty() {
                mark = line
                    .strip_prefix("<!-- not run: ")
                    .and_then(|rest| rest.strip_suffix(" -->"));
            }
            index += 1;
            continue;
        };
        let first = index + 1;
        let len = lines[first..]
            .iter()
            .position(|line| line.trim() == "```")
            .ok_or(format!("{first}: this block does not end"))?;
        match (language, mark.take()) {
            (_, Some(_)) => {}
            ("console", None) => steps.extend(find_block_steps(lines, first..first + len)?),
            _ => {
                return Err(format!(
                    "{first}: say `console`, and the commands are typed, or <!-- not run: REASON --> before the block"
                ));
            }
        }
        index = first + len + 1;
    }
    Ok(steps)
}

fn find_block_steps(lines: &[String], block: Range<usize>) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    for index in block {
        let line = &lines[index];
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step {
                command: command.to_owned(),
                seen: index + 1..index + 1,
            });
            continue;
        }
        let last = steps
            .last_mut()
            .ok_or(format!("{}: a block begins with a command", index + 1))?;
        match line.strip_prefix("> ").or((line == ">").then_some("")) {
            Some(more) if last.seen.is_empty() => {
                last.command.push('\n');
                last.command.push_str(more);
                last.seen = index + 1..index + 1;
            }
            _ => last.seen.end = index + 1,
        }
    }
    Ok(steps)
}

fn is_alike(page: &[String], seen: &[String]) -> bool {
    let normal =
        |lines: &[String]| -> Vec<String> { lines.iter().map(|line| normalize(line)).collect() };
    normal(page) == normal(seen)
}

/// A line without what differs between two runs: numbers are `0`, sizes, rates and times with any unit `SIZE`, `RATE` and
/// `TIME`, bars have no length, and columns no width. What had been drained by itself before a command asked for it does
/// not count either.
pub fn normalize(line: &str) -> String {
    static RULES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        [
            (r"\[?[#█░·━-]{8,}\]?", "BAR"),
            (r"[0-9]+([.,][0-9]+)*", "0"),
            (r"(?-u:\b)0 ([KMG]i)?B/s", "RATE"),
            (r"(?-u:\b)0 (([KMG]i)?B|bytes)(?-u:\b)", "SIZE"),
            (r"(?-u:\b)0 (µs|ms|s|min|h)(?-u:\b)", "TIME"),
            ("[ \t]+", " "),
            (", RATE in the last seconds", ""),
            (
                r"(everything [^:]*): (SIZE in 0 files? were|nothing was) left to write, TIME",
                "$1",
            ),
        ]
        .map(|(pattern, to)| (Regex::new(pattern).expect("a pattern"), to))
        .into()
    });
    let mut text = line.trim().to_owned();
    for (pattern, to) in &*RULES {
        text = pattern.replace_all(&text, *to).into_owned();
    }
    text
}

/// The shell into which the commands of a page are typed.
struct Shell {
    bash: Child,
    input: ChildStdin,
    output: File,
    /// The command that runs.
    step_file: PathBuf,
    home: PathBuf,
    runtime: PathBuf,
}

impl Shell {
    fn start(sandbox: &Sandbox) -> Self {
        let private = sandbox.mkdir(".page");
        let output = private.join("output");
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(true);
        let output = options.open(output).expect("a file for what is seen");
        let mut command = Command::new("bash");
        sandbox.environment(&mut command);
        command
            .args(["--noprofile", "--norc"])
            .env("LC_ALL", "C.UTF-8")
            .env_remove("COLUMNS")
            .current_dir(sandbox.path())
            .stdin(Stdio::piped())
            .stdout(output.try_clone().expect("dup"))
            .stderr(output.try_clone().expect("dup"));
        let firn = crate::sandbox::firn_binary();
        let directory = firn.parent().expect("the binary is in a directory");
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", directory.display()));
        // Tests run as root, on fewer cores than an example has ranks.
        for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
            command.env(name, "1");
        }
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
        let mut bash = command.spawn().expect("start bash");
        let input = bash.stdin.take().expect("piped");
        Self {
            bash,
            input,
            output,
            step_file: private.join("step"),
            home: sandbox.path().to_owned(),
            runtime: sandbox.runtime().to_owned(),
        }
    }

    /// Types a command; gives what is seen, with the paths that are on a page, and the exit status.
    #[track_caller]
    fn run(&mut self, command: &str) -> (Vec<String>, i32) {
        fs::write(&self.step_file, format!("{command}\n")).expect("write the command");
        self.output.set_len(0).expect("empty the output");
        // The command reads nothing of what is typed after it, and sees the status of the one before.
        let typed = format!(
            "(exit ${{page_status:-0}}); . '{}' </dev/null; page_status=$?; printf '\\n%s %s\\n' '{END_MARK}' \"$page_status\"\n",
            self.step_file.display()
        );
        self.input
            .write_all(typed.as_bytes())
            .expect("the shell runs");
        let mut text = String::new();
        wait_until(
            &format!("`{command}` has ended"),
            PROGRAM_LIMIT.min(Duration::from_secs(120)),
            || {
                text = self.read_output();
                text.ends_with('\n') && text.contains(END_MARK)
            },
        );
        let (seen, status) = text.split_once(END_MARK).expect("it is there");
        let status = status.trim().parse().expect("an exit status");
        (self.lines_on_page(seen), status)
    }

    fn read_output(&mut self) -> String {
        let mut bytes = Vec::new();
        self.output.seek(SeekFrom::Start(0)).expect("rewind");
        self.output.read_to_end(&mut bytes).expect("read");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What is seen as it would be on a machine of the reader's.
    fn lines_on_page(&self, seen: &str) -> Vec<String> {
        // An interactive shell says only the word.
        static KILLED: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new("^[^ ]+: (line [0-9]+: )?[ ]*[0-9]+ Killed ").expect("a pattern")
        });
        let text = seen
            .replace(&*self.runtime.to_string_lossy(), RUNTIME_ON_PAGE)
            .trim_end_matches('\n')
            .to_owned();
        if text.is_empty() {
            return Vec::new();
        }
        text.lines()
            .map(|line| {
                if KILLED.is_match(line) {
                    "Killed".to_owned()
                } else {
                    line.replace(&*self.home.to_string_lossy(), HOME_ON_PAGE)
                }
            })
            .map(|line| line.trim_end().to_owned())
            .collect()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.bash.kill();
        let _ = self.bash.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn commands_and_what_is_seen_are_found() {
        let page = lines("text\n```console\n$ cat <<E\n> a\n> E\na\n\n$ true\n```\n");
        let expected = [("cat <<E\na\nE", 5..7), ("true", 8..8)];
        let expected = expected.map(|(command, seen)| Step {
            command: command.to_owned(),
            seen,
        });
        assert_eq!(find_steps(&page), Ok(expected.into()));
    }

    #[test]
    fn a_block_is_run_or_says_why_not() {
        let marked = "<!-- not run: needs root -->\n```\nsudo true\n```\n";
        assert_eq!(find_steps(&lines(marked)), Ok(Vec::new()));
        assert!(find_steps(&lines("```\nsudo true\n```\n")).is_err());
        // A mark is for one block.
        assert!(find_steps(&lines(&format!("{marked}```\nls\n```\n"))).is_err());
        assert!(find_steps(&lines("```console\n$ ls\n")).is_err());
    }

    #[test]
    fn numbers_units_and_bars_do_not_count_and_words_do() {
        let same = [
            ("held  1.5 KiB in 1,712 writes", "held 36 MiB in 9 writes"),
            ("took 12.1 ms.", "took   3 s."),
            ("arena ###------- 3%", "arena -------### 100%"),
            ("firnd 4711, up 1 min", "firnd 9, up 30 s"),
            (
                "1 MiB in 3 writes, 2 MiB/s in the last seconds",
                "1 MiB in 3 writes",
            ),
            (
                "everything at /c is durable: 4 MiB in 1 file were left to write, 3 ms",
                "everything at /c is durable: nothing was left to write, 1 s",
            ),
            (
                "unmounted /c; everything is drained to /b: 4 MiB in 2 files were left to write, 1 s",
                "unmounted /c; everything is drained to /b",
            ),
        ];
        for (a, b) in same {
            assert_eq!(normalize(a), normalize(b));
        }
        let different = [
            ("1 file", "1 files"),
            ("drained 1 MiB", "drained"),
            ("1 MiB/s", "1 MiB"),
            ("step_1", "step"),
            (
                "everything at /c is durable: nothing was left to write, 1 s",
                "everything at /c is drained: nothing was left to write, 1 s",
            ),
        ];
        for (a, b) in different {
            assert_ne!(normalize(a), normalize(b));
        }
    }

    #[test]
    fn a_page_is_written_anew_around_its_commands() {
        let page = Page {
            path: PathBuf::new(),
            lines: lines("a\n```console\n$ one\nold\nold\n$ two\n```\nz"),
            steps: find_steps(&lines("a\n```console\n$ one\nold\nold\n$ two\n```\nz")).unwrap(),
        };
        let seen = [vec!["new".to_owned()], vec!["more".to_owned()]];
        assert_eq!(
            page.with_seen(&seen),
            "a\n```console\n$ one\nnew\n$ two\nmore\n```\nz\n"
        );
    }
}
