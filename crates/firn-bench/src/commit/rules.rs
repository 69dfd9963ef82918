//! Measures the cost of commit rules: for files to which no rule applies, and for a checkpoint that a rule commits.

use std::path::{Path, PathBuf};

use super::{CommitArgs, NO_RULES, RULES, WRITE_BYTES, add_cases};
use anyhow::Context as _;

use crate::cpu;
use crate::durable;
use crate::firn::{Firn, Mount};
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Operation, Task, elapsed_s};
use firn_config::size_text;

/// Goals of the ratio to the mount without rules.
const CREATE_RATE_MIN: Limit = Limit::Least(0.97);
const SAVE_TIME_MAX: Limit = Limit::Most(1.05);
/// Two rules beside the built-in ones, which makes 30 rules. A rule has a name, a pattern of paths (`{T}`
/// stands for any step), and the event at which files of these paths are committed.
const SITE_RULES: &str = "\
bench-a   bench-a-*/   close:done
bench-b   bench-b.{T}  next
";
/// Number of rules that Firn has itself.
const BUILT_IN_COUNT: usize = 28;

/// A mount with transactions, with or without commit rules.
struct Mounted<'a> {
    name: &'static str,
    backing_dir: PathBuf,
    mount: Mount<'a>,
}

/// Returns the value of the mount option for all rules: the names of the built-in ones, and the path of a file with
/// [`SITE_RULES`].
fn all_rules(firn: &Firn, work: &Path) -> anyhow::Result<String> {
    let listed = firn.run(&["rules".as_ref(), "list".as_ref()])?;
    let listed = String::from_utf8(listed).context("`firn rules list` is no text")?;
    let rule_lines = listed.lines().filter(|line| !line.starts_with('#'));
    let mut names: Vec<&str> = rule_lines
        .filter_map(|line| line.split_ascii_whitespace().next())
        .collect();
    anyhow::ensure!(
        names.len() == BUILT_IN_COUNT,
        "expected {BUILT_IN_COUNT} built-in rules, found {}",
        names.len()
    );
    let site = work.join("site.rules");
    std::fs::write(&site, SITE_RULES)?;
    let site = site.to_string_lossy();
    names.push(&site);
    Ok(names.join(":"))
}

/// Mounts Firn over a new directory in `dir`. The mount point is in `work`.
fn mount<'a>(
    firn: &'a Firn,
    work: &Path,
    dir: &Path,
    name: &'static str,
    options: &str,
) -> anyhow::Result<Mounted<'a>> {
    let dir_name = name.replace(' ', "-");
    let backing_dir = dir.join(&dir_name);
    let mount = firn.mount(&backing_dir, &work.join(format!("at-{dir_name}")), options)?;
    mount.wait_populated()?;
    Ok(Mounted {
        name,
        backing_dir,
        mount,
    })
}

/// Measures the mounts in turns, once in each repeat. Returns the samples of each mount.
fn measure(
    args: &CommitArgs,
    mounts: &[Mounted<'_>],
    mut one: impl FnMut(&Mounted<'_>, u32) -> anyhow::Result<Sample>,
) -> anyhow::Result<Vec<(String, Vec<Sample>)>> {
    let mut samples: Vec<(String, Vec<Sample>)> = mounts
        .iter()
        .map(|mounted| (mounted.name.to_owned(), Vec::new()))
        .collect();
    for round in 0..args.common.repeats() {
        for (mounted, (_, samples)) in mounts.iter().zip(&mut samples) {
            durable::sync_all(&mounted.backing_dir)?;
            samples.push(one(mounted, round)?);
        }
    }
    Ok(samples)
}

/// Creates files to which no rule applies.
fn create_files(mounted: &Mounted<'_>, round: u32, count: u64) -> anyhow::Result<Sample> {
    let dir = mounted.mount.path().join(format!("plain-{round}"));
    std::fs::create_dir(&dir)?;
    let outcomes = worker::run_all(&[Task::Names {
        dir: dir.clone(),
        count,
        operation: Operation::Create,
    }])?;
    std::fs::remove_dir_all(&dir)?;
    let a_second = count as f64 / elapsed_s(&outcomes);
    Ok(vec![("created", "1/s", a_second)])
}

/// Writes one file in large writes, as torch.save does. With a commit rule the file is durable when close(2) returns.
/// Without a rule the program syncs the file.
fn save(mounted: &Mounted<'_>, round: u32, bytes: u64) -> anyhow::Result<Sample> {
    let path = mounted.mount.path().join(format!("step-{round}.pt"));
    let outcomes = worker::run_all(&[Task::Write {
        path: path.clone(),
        runs: vec![(bytes / WRITE_BYTES, WRITE_BYTES)],
        sync: false,
        over: false,
    }])?;
    if mounted.name == NO_RULES {
        durable::sync_files([path.as_path()].into_iter(), mounted.mount.path())?;
    }
    let end_ns = cpu::now_ns();
    let begin_ns = outcomes.iter().map(|outcome| outcome.begin_ns).min();
    std::fs::remove_file(&path)?;
    Ok(vec![
        ("closed", "s", elapsed_s(&outcomes)),
        (
            "durable",
            "s",
            (end_ns - begin_ns.unwrap_or(end_ns)) as f64 * 1e-9,
        ),
    ])
}

/// Measures the cost of commit rules: compares a mount with 30 rules with a mount without rules. One case creates small
/// files to which no rule applies, and the other saves one large file that a rule commits. Adds both to the report.
pub(super) fn run(
    args: &CommitArgs,
    firn: &Firn,
    work: &Path,
    dir: &Path,
    report: &mut Report,
) -> anyhow::Result<()> {
    let extra_options = args.extra_options();
    let rules = all_rules(firn, work)?;
    let with_rules = format!("drain=commit,rules={rules}{extra_options}");
    let mounts = [
        mount(
            firn,
            work,
            dir,
            NO_RULES,
            &format!("drain=commit{extra_options}"),
        )?,
        mount(firn, work, dir, RULES, &with_rules)?,
    ];
    report.note(
        "rules: the 28 built-in rules and 2 more, beside a mount that differs in nothing else",
    );
    let count = args.count.unwrap_or(args.common.choose(10_000, 1_000));
    let samples = measure(args, &mounts, |mounted, round| {
        create_files(mounted, round, count)
    })?;
    add_cases(report, [format!("{count} files of no rule")], vec![samples]);
    judge(report, "created", CREATE_RATE_MIN);
    let bytes = args
        .size
        .unwrap_or(args.common.choose(1536 << 20, 64 << 20));
    let samples = measure(args, &mounts, |mounted, round| save(mounted, round, bytes))?;
    let title = format!(
        "save of {}, committed by a rule or synced",
        size_text(bytes)
    );
    add_cases(report, [title], vec![samples]);
    judge(report, "durable", SAVE_TIME_MAX);
    Ok(())
}

/// Adds a goal for the ratio of a metric with rules to that without rules, in the last case.
fn judge(report: &mut Report, metric: &str, limit: Limit) {
    let ratio = report
        .cases
        .last()
        .and_then(|case| case.ratio(RULES, NO_RULES, metric));
    report.judge(
        format!("{metric}, {RULES} to {NO_RULES}"),
        limit,
        ratio.as_slice(),
    );
}
