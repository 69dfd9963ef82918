//! The rule that chooses the lane of a new file. A *lane* is a directory or a server for the data of files.
//!
//! The first of these cases that applies decides:
//!
//! 1. The first line of the configuration file (the lane map) whose pattern matches the file's name.
//! 2. If the name has a number: the sum of the numbers in the name and in the names of the directories above, modulo
//!    the number of lanes. The paths of a checkpoint's files differ in the number of the rank; all other numbers in
//!    them are equal. The hosts of a job therefore balance exactly, without messages.
//! 3. The lane with the fewest files of the directory (module `balance`). This case applies if the name has no number,
//!    or if the lane of the sum has far more than its share. If several lanes have equally few files, they are chosen
//!    in turn, from a start that differs between hosts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use globset::{Glob, GlobMatcher};
use xxhash_rust::xxh3::xxh3_64;

use balance::Dirs;

mod balance;

/// The rule of one mount.
#[derive(Debug)]
pub struct Rule {
    /// Number of lanes that accept new files.
    lanes: usize,
    /// The lines of the configuration file.
    lines: Vec<Line>,
    /// Number of the next turn, for lanes with equally few files.
    turn: AtomicU64,
    /// The counts of files, by directory.
    dirs: Mutex<Dirs>,
}

/// The directory of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Inode number of the directory.
    pub ino: u64,
    /// Sum of the numbers in the directory's name and in the names of the directories above, as far as they are known
    /// ([`add_numbers`]).
    pub sum: u64,
}

/// The reason for the choice of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// This line of the configuration file, counted from 1.
    Line(usize),
    /// The sum of the numbers in the name and in the names of the directories.
    Number(u64),
    /// The lane has the fewest files of the directory.
    Balance,
}

/// A line of the configuration file: files whose names match the pattern go to this lane.
#[derive(Debug)]
struct Line {
    /// Line number, counted from 1.
    number: usize,
    pattern: GlobMatcher,
    lane: usize,
}

/// Error in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct MapError {
    /// Line number, counted from 1.
    pub line: usize,
    /// The error, and how to correct it.
    pub reason: String,
}

impl Rule {
    /// Creates a rule without a configuration file, for `lanes` lanes (at least 1), on the host of this name.
    pub fn new(lanes: usize, host: &str) -> Self {
        assert!(lanes > 0, "there is a lane to go to");
        // The hosts of a job usually have consecutive numbers. With the host's number as start, the turns of the hosts
        // begin on different lanes.
        let first_turn = sum_numbers(host.as_bytes()).unwrap_or_else(|| xxh3_64(host.as_bytes()));
        Self {
            lanes,
            lines: Vec::new(),
            turn: AtomicU64::new(first_turn),
            dirs: Mutex::default(),
        }
    }

    /// Adds the configuration file `text`: lines of a pattern and the number of a lane (server for data), counted from
    /// 0.
    ///
    /// A pattern is compared with a file's name without its directories. The pattern may have `*`, `?`, `[…]` and
    /// `{…,…}`. Empty lines and lines that begin with `#` are ignored.
    pub fn with_map(self, text: &str) -> Result<Self, MapError> {
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parsed = parse_line(line, self.lanes);
            let (pattern, lane) = parsed.map_err(|reason| MapError {
                line: number,
                reason,
            })?;
            lines.push(Line {
                number,
                pattern,
                lane,
            });
        }
        Ok(Self { lines, ..self })
    }

    /// Returns the number of lanes that accept new files.
    pub fn lane_count(&self) -> usize {
        self.lanes
    }

    /// Chooses the lane (the number of a directory or server for data) of a new file, and returns it with the reason:
    /// 1. the lane of the first line in the configuration whose pattern matches the name,
    /// 2. the lane that the numbers in the path and the name determine, unless it has far more than its share of the
    ///    directory's files,
    /// 3. the lane with the fewest files of the directory.
    ///
    /// If the files of the directory were not counted yet, `count_files` returns their number on each lane.
    pub fn choose(
        &self,
        parent: Parent,
        name: &OsStr,
        count_files: impl FnOnce() -> Vec<u64>,
    ) -> (usize, Reason) {
        if let Some(choice) = self.lane_by_line(name) {
            return choice;
        }
        let dir = parent.ino;
        let is_known = self.dirs.lock().contains(dir);
        // The files are counted without the lock, because that makes calls of the backing.
        let files_by_lane = if is_known { Vec::new() } else { count_files() };
        let mut dirs = self.dirs.lock();
        if !is_known {
            debug_assert_eq!(files_by_lane.len(), self.lanes);
            dirs.add(dir, files_by_lane);
        }
        if let Some((lane, reason)) = self.lane_by_numbers(parent.sum, name)
            && !dirs.is_crowded(dir, lane)
        {
            return (lane, reason);
        }
        // If several lanes have equally few files, they take turns.
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        (dirs.emptiest(dir, self.lane_of_turn(turn)), Reason::Balance)
    }

    /// Records that a file, for which [`Rule::choose`] was called, was created in a lane. `dir` is the inode number
    /// of its directory.
    pub fn record_file(&self, dir: u64, lane: usize) {
        self.dirs.lock().count_file(dir, lane);
    }

    /// Records that a directory with this inode number was created.
    pub fn record_new_dir(&self, dir: u64) {
        self.dirs.lock().forget(dir);
    }

    /// Returns the lane that the name alone determines. `sum` is the sum of the numbers in the names of the directories
    /// above.
    pub fn explain(&self, sum: u64, name: &OsStr) -> Option<(usize, Reason)> {
        self.lane_by_line(name)
            .or_else(|| self.lane_by_numbers(sum, name))
    }

    /// Returns the lane that the numbers in a path determine, or `None` if the name has no number.
    fn lane_by_numbers(&self, sum: u64, name: &OsStr) -> Option<(usize, Reason)> {
        let sum = sum.wrapping_add(sum_numbers(name.as_bytes())?);
        Some((self.lane_of_turn(sum), Reason::Number(sum)))
    }

    /// Returns the lane of the first line whose pattern matches the name.
    fn lane_by_line(&self, name: &OsStr) -> Option<(usize, Reason)> {
        let line = self.lines.iter().find(|line| line.pattern.is_match(name))?;
        Some((line.lane, Reason::Line(line.number)))
    }

    /// Returns the lane of a turn. Turns go round all lanes.
    pub fn lane_of_turn(&self, turn: u64) -> usize {
        (turn % self.lanes as u64) as usize
    }
}

/// Parses a line of the configuration file. The error says what is wrong with the line.
fn parse_line(line: &str, lanes: usize) -> Result<(GlobMatcher, usize), String> {
    let (pattern_text, lane_text) = line
        .rsplit_once(char::is_whitespace)
        .ok_or_else(|| format!("`{line}` has no lane: write a pattern, a space and a number"))?;
    let pattern_text = pattern_text.trim_end();
    if pattern_text.contains('/') {
        return Err(format!(
            "`{pattern_text}` has a slash: patterns are compared with names, without directories"
        ));
    }
    let lane: usize = lane_text
        .parse()
        .map_err(|_| format!("`{lane_text}` is not the number of a lane"))?;
    if lane >= lanes {
        return Err(format!(
            "there is no lane {lane}: lanes are numbered 0 to {}",
            lanes - 1
        ));
    }
    let pattern =
        Glob::new(pattern_text).map_err(|error| format!("`{pattern_text}`: {}", error.kind()))?;
    Ok((pattern.compile_matcher(), lane))
}

/// Returns the sum of numbers of the directory `name` in a directory with the sum `above`.
pub fn add_numbers(above: u64, name: &OsStr) -> u64 {
    above.wrapping_add(sum_numbers(name.as_bytes()).unwrap_or(0))
}

/// Returns the sum of the numbers in a name, modulo 2^64. Returns `None` if the name has no number.
fn sum_numbers(name: &[u8]) -> Option<u64> {
    name.split(|byte| !byte.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .map(parse_digits)
        .reduce(u64::wrapping_add)
}

/// Returns the value of decimal digits, modulo 2^64.
fn parse_digits(digits: &[u8]) -> u64 {
    digits.iter().fold(0, |number: u64, digit| {
        number
            .wrapping_mul(10)
            .wrapping_add(u64::from(digit - b'0'))
    })
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;

    use super::*;

    /// Returns the lane of a file that is made in a directory.
    fn lane_in(rule: &Rule, parent: Parent, name: &str) -> (usize, Reason) {
        let count_files = || vec![0; rule.lane_count()];
        let (lane, reason) = rule.choose(parent, OsStr::new(name), count_files);
        rule.record_file(parent.ino, lane);
        (lane, reason)
    }

    fn lane(rule: &Rule, name: &str) -> (usize, Reason) {
        lane_in(rule, dir(1), name)
    }

    fn dir(ino: u64) -> Parent {
        Parent { ino, sum: 0 }
    }

    fn hosts(count: usize, lanes: usize) -> Vec<Rule> {
        let host = |number| Rule::new(lanes, &format!("node{number:02}"));
        (0..count).map(host).collect()
    }

    /// How the ranks of a job are distributed over its hosts.
    #[derive(Clone, Copy, Debug)]
    enum Ranks {
        Block,
        Cyclic,
    }

    impl Ranks {
        fn host_of(self, rank: usize, ranks: usize, hosts: usize) -> usize {
            match self {
                Self::Block => rank * hosts / ranks,
                Self::Cyclic => rank % hosts,
            }
        }
    }

    #[test]
    fn ranks_balance_exactly_over_all_hosts() {
        let hosts = hosts(4, 4);
        let mut counts = [0; 4];
        for rank in 0..64 {
            counts[lane(&hosts[rank / 16], &format!("step_10.rank_{rank}")).0] += 1;
        }
        assert_eq!(counts, [16; 4]);
    }

    #[test]
    fn the_sum_of_the_numbers_decides() {
        let sum = |name: &str| sum_numbers(name.as_bytes());
        assert_eq!(sum("rank_17"), Some(17));
        assert_eq!(sum("rank_17.h5"), Some(22));
        assert_eq!(sum("step100-rank007.ckpt"), Some(107));
        assert_eq!(sum("12"), Some(12));
        assert_eq!(sum("latest"), None);
        assert_eq!(
            sum("99999999999999999999999"),
            sum("99999999999999999999999")
        );
    }

    #[test]
    fn names_without_a_number_take_turns() {
        let rule = Rule::new(3, "node");
        let mut seen: Vec<usize> = (0..3).map(|_| lane(&rule, "latest").0).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
        assert_eq!(rule.explain(3, OsStr::new("latest")), None);
    }

    const PROGRAM_LANES: usize = 7;
    const PROGRAM_RANKS: usize = 28;

    /// How a program names the files of a checkpoint: returns the name of the file of a rank, of [`PROGRAM_RANKS`], at
    /// a step.
    type NameOf = fn(rank: usize, step: usize) -> String;

    const PROGRAMS: [(&str, NameOf); 14] = [
        ("plain", |rank, _| format!("rank_{rank}")),
        ("HDF5", |rank, _| format!("rank_{rank}.h5")),
        ("ICON, NetCDF", |rank, _| format!("restart.{rank:04}.nc4")),
        ("DeepSpeed", |rank, _| {
            format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        }),
        ("DeepSpeed, model parallel", |rank, _| {
            let (data, model) = (rank / 4, rank % 4);
            format!("zero_pp_rank_{data}_mp_rank_{model:02}_optim_states.pt")
        }),
        ("torch DCP", |rank, _| format!("__{rank}_0.distcp")),
        ("safetensors", |rank, _| {
            format!("model-{:05}-of-{PROGRAM_RANKS:05}.safetensors", rank + 1)
        }),
        ("TensorFlow", |rank, _| {
            format!("variables.data-{rank:05}-of-{PROGRAM_RANKS:05}")
        }),
        ("LAMMPS", |rank, step| {
            format!("restart.{rank}.{}", 100_000 * (step + 1))
        }),
        ("FTI", |rank, step| format!("Ckpt{step}-Rank{rank}.fti")),
        ("WRF", |rank, step| {
            format!("wrfrst_d01_2026-11-25_{step:02}:00:00_{rank:04}")
        }),
        ("NEMO", |rank, step| {
            format!("ORCA2_{:08}_restart_{rank:04}.nc", 720 * (step + 1))
        }),
        ("HDF5 subfiling", |rank, _| {
            format!("run.h5.subfile_131077_{}_of_{PROGRAM_RANKS}", rank + 1)
        }),
        ("DMTCP", |rank, step| {
            format!("ckpt_a.out_7e0aabcd-{}-65a1f{step}.dmtcp", 40_000 + rank)
        }),
    ];

    /// The directories in which the files of checkpoints are.
    #[derive(Clone, Copy, Debug)]
    enum Dirs {
        /// One directory for all checkpoints.
        One,
        /// A new directory for each checkpoint.
        Steps,
        /// A directory for each rank.
        Ranks,
    }

    impl Dirs {
        fn parent_of(self, rank: usize, step: usize) -> Parent {
            let (ino, name) = match self {
                Self::One => (1, "ckpt".into()),
                Self::Steps => (step, format!("step_{}", 1000 * step)),
                Self::Ranks => (rank, format!("rank{rank:03}")),
            };
            Parent {
                ino: ino as u64,
                sum: add_numbers(0, OsStr::new(&name)),
            }
        }
    }

    /// Creates the files of some checkpoints, each in random order. Returns the number of files on the fullest lane of
    /// each checkpoint.
    fn fullest_lanes(
        name_of: NameOf,
        hosts: &[Rule],
        ranks: Ranks,
        rng: &mut StdRng,
        dirs: Dirs,
    ) -> Vec<usize> {
        let checkpoints = (0..4).map(|step| {
            let mut order: Vec<usize> = (0..PROGRAM_RANKS).collect();
            order.shuffle(rng);
            let mut counts = [0; PROGRAM_LANES];
            for rank in order {
                let host = ranks.host_of(rank, PROGRAM_RANKS, hosts.len());
                let name = name_of(rank, step);
                counts[lane_in(&hosts[host], dirs.parent_of(rank, step), &name).0] += 1;
            }
            counts.into_iter().max().expect("there are lanes")
        });
        checkpoints.collect()
    }

    /// Proves S-place-4.
    #[test]
    fn no_lane_gets_more_than_twice_its_share_of_the_names_that_programs_give() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let share = PROGRAM_RANKS / PROGRAM_LANES;
        for (program, name_of) in PROGRAMS {
            for count in [1, 2, 4, 7, 14, PROGRAM_RANKS] {
                for ranks in [Ranks::Block, Ranks::Cyclic] {
                    for dirs in [Dirs::One, Dirs::Steps] {
                        let rules = hosts(count, PROGRAM_LANES);
                        let fullest = fullest_lanes(name_of, &rules, ranks, &mut rng, dirs);
                        let most = fullest.iter().max().expect("there are checkpoints");
                        assert!(
                            *most <= 2 * share,
                            "{program}, {count} hosts, {ranks:?}, {dirs:?}: {fullest:?}"
                        );
                    }
                }
            }
        }
    }

    /// Proves S-place-4.
    #[test]
    fn ranks_with_a_directory_each_balance_exactly() {
        let mut rng = StdRng::seed_from_u64(1);
        for name_of in [|_, _| "state.h5".into(), |_, step| format!("step_{step}")] as [NameOf; 2] {
            for count in [1, 4, 7] {
                let rules = hosts(count, PROGRAM_LANES);
                let fullest = fullest_lanes(name_of, &rules, Ranks::Cyclic, &mut rng, Dirs::Ranks);
                assert_eq!(fullest, [PROGRAM_RANKS / PROGRAM_LANES; 4]);
            }
        }
    }

    /// Proves S-place-4.
    #[test]
    fn numbers_that_tell_no_files_apart_balance_by_what_the_directory_has() {
        let forms: [fn(usize) -> String; 5] = [
            |at| format!("part_{at}_of_{}", 99 - at),
            |at| format!("step_{}.h5", 7000 * at),
            |at| format!("block-{:c<at$}-00.bin", "", at = at + 1),
            |at| format!("{:x}.bin", xxh3_64(&at.to_le_bytes())),
            |at| format!("{:c<at$}", "", at = at + 1),
        ];
        for name_of in forms {
            let rule = Rule::new(7, "node");
            let mut counts = [0_usize; 7];
            for at in 0..70 {
                counts[lane(&rule, &name_of(at)).0] += 1;
                let share = (at + 1).div_ceil(7);
                let most = counts.iter().copied().max().expect("there are lanes");
                let name = name_of(at);
                assert!(most <= (2 * share).max(4), "{name}: {counts:?}");
            }
        }
    }

    #[test]
    fn a_directory_that_was_there_is_looked_at_once_and_a_new_lane_does_not_get_all() {
        let rule = Rule::new(2, "node0");
        // If each of several mounts creates one file, the balance must not send all of these to lane 0.
        let single = rule.choose(dir(1), OsStr::new("step_4000"), || vec![20, 0]);
        assert_eq!(single, (1, Reason::Balance));
        rule.record_file(1, 1);
        let again = rule.choose(dir(1), OsStr::new("a"), || panic!("it is known"));
        assert_eq!(again, (1, Reason::Balance));
        // Lane 1 is new and has no files. The files of a checkpoint nevertheless go to both lanes.
        let rule = Rule::new(2, "node0");
        let mut counts = [0; 2];
        for rank in 0..32 {
            let name = format!("rank_{rank}");
            let (lane, _) = rule.choose(dir(7), OsStr::new(&name), || vec![1000, 0]);
            rule.record_file(7, lane);
            counts[lane] += 1;
        }
        assert!(counts[0] >= 8, "{counts:?}");
    }

    #[test]
    fn a_file_that_is_made_anew_under_its_name_stays_on_its_lane() {
        let rule = Rule::new(4, "node");
        for _ in 0..10 {
            for rank in 0..8_usize {
                let name = format!("rank_{rank}.h5");
                assert_eq!(lane(&rule, &name).0, (rank + 5) % 4);
            }
        }
    }

    #[test]
    fn what_is_remembered_of_directories_is_bounded() {
        let rule = Rule::new(2, "node");
        for ino in 0..10_000 {
            lane_in(&rule, dir(ino), "rank_1");
        }
        assert!(rule.dirs.lock().is_bounded());
    }

    #[test]
    fn a_map_goes_before_numbers() {
        let map = "# big ones apart\n\nmodel*.pt 2\n{a,b}?.txt  0\n";
        let rule = Rule::new(3, "node").with_map(map).unwrap();
        assert_eq!(lane(&rule, "model-4.pt"), (2, Reason::Line(3)));
        assert_eq!(lane(&rule, "b1.txt"), (0, Reason::Line(4)));
        assert_eq!(lane(&rule, "rank_4"), (1, Reason::Number(4)));
    }

    #[test]
    fn mistakes_in_a_map_are_named_with_their_line() {
        let error = |map: &str| {
            let rule = Rule::new(2, "node").with_map(map);
            rule.expect_err("a mistake").to_string()
        };
        assert_eq!(
            error("a 0\nb 2\n"),
            "line 2: there is no lane 2: lanes are numbered 0 to 1"
        );
        assert!(error("x").starts_with("line 1: `x` has no lane"));
        assert!(error("x y").starts_with("line 1: `y` is not the number"));
        assert!(error("d/x 1").contains("has a slash"));
        assert!(error("[ 1").starts_with("line 1: `[`: "));
    }
}
