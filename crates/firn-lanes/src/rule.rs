//! Which lane a new file goes to.
//!
//! In this order: the first line of the configuration file whose pattern matches the file's name (the paper's way);
//! the last number in the name modulo the lanes, so that the hosts of a job balance exactly without a message; the
//! next lane in turn, from a start that differs between hosts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};

use globset::{Glob, GlobMatcher};

/// Decides for one mount.
#[derive(Debug)]
pub struct Rule {
    lanes: usize,
    lines: Vec<Line>,
    turn: AtomicU64,
}

/// Why a name goes to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// This line of the configuration file, from 1.
    Line(usize),
    /// This number, the last in the name.
    Number(u64),
    /// It was the lane's turn.
    Turn,
}

#[derive(Debug)]
struct Line {
    number: usize,
    pattern: GlobMatcher,
    lane: usize,
}

/// What is wrong with a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct MapError {
    /// From 1.
    pub line: usize,
    /// What is wrong, and what to write.
    pub reason: String,
}

impl Rule {
    /// Without a configuration file, for `lanes` lanes (at least 1), on the host of this name.
    pub fn new(lanes: usize, host: &str) -> Self {
        assert!(lanes > 0, "there is a lane to go to");
        Self {
            lanes,
            lines: Vec::new(),
            turn: AtomicU64::new(xxhash_rust::xxh3::xxh3_64(host.as_bytes())),
        }
    }

    /// With the configuration file `text`: lines of a pattern and the number of a lane, from 0. A pattern is compared
    /// with a file's name, without its directories, and may have `*`, `?`, `[…]` and `{…,…}`. Lines that are empty or
    /// begin with `#` say nothing.
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

    /// How many lanes take new files.
    pub fn lane_count(&self) -> usize {
        self.lanes
    }

    /// The lane of a new file with this name, and why. A lane whose turn it was gets its next turn after all others.
    pub fn choose(&self, name: &OsStr) -> (usize, Reason) {
        self.explain(name).unwrap_or_else(|| {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            (self.lane_of_turn(turn), Reason::Turn)
        })
    }

    /// The same, where the name alone decides.
    pub fn explain(&self, name: &OsStr) -> Option<(usize, Reason)> {
        let line = self.lines.iter().find(|line| line.pattern.is_match(name));
        if let Some(line) = line {
            return Some((line.lane, Reason::Line(line.number)));
        }
        let number = last_number(name.as_bytes())?;
        Some((self.lane_of_turn(number), Reason::Number(number)))
    }

    /// The lane of a turn: turns go round the lanes.
    pub fn lane_of_turn(&self, turn: u64) -> usize {
        (turn % self.lanes as u64) as usize
    }
}

fn parse_line(line: &str, lanes: usize) -> Result<(GlobMatcher, usize), String> {
    let (pattern, lane) = line
        .rsplit_once(char::is_whitespace)
        .ok_or_else(|| format!("`{line}` has no lane: write a pattern, a space and a number"))?;
    let pattern = pattern.trim_end();
    if pattern.contains('/') {
        return Err(format!(
            "`{pattern}` has a slash: patterns are compared with names, without directories"
        ));
    }
    let lane: usize = lane
        .parse()
        .map_err(|_| format!("`{lane}` is not the number of a lane"))?;
    if lane >= lanes {
        return Err(format!(
            "there is no lane {lane}: they are 0 to {}",
            lanes - 1
        ));
    }
    let pattern = Glob::new(pattern).map_err(|error| format!("`{pattern}`: {}", error.kind()))?;
    Ok((pattern.compile_matcher(), lane))
}

/// The last number in a name, modulo 2^64.
fn last_number(name: &[u8]) -> Option<u64> {
    let end = name.iter().rposition(u8::is_ascii_digit)? + 1;
    let digits = name[..end]
        .iter()
        .rposition(|byte| !byte.is_ascii_digit())
        .map_or(&name[..end], |before| &name[before + 1..end]);
    Some(digits.iter().fold(0, |number: u64, digit| {
        number
            .wrapping_mul(10)
            .wrapping_add(u64::from(digit - b'0'))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(rule: &Rule, name: &str) -> (usize, Reason) {
        rule.choose(OsStr::new(name))
    }

    #[test]
    fn ranks_balance_exactly_over_all_hosts() {
        let hosts: Vec<Rule> = (0..4)
            .map(|host| Rule::new(4, &format!("node{host}")))
            .collect();
        let mut counts = [0; 4];
        for rank in 0..64 {
            counts[lane(&hosts[rank / 16], &format!("step_10.rank_{rank}")).0] += 1;
        }
        assert_eq!(counts, [16; 4]);
    }

    #[test]
    fn the_last_number_decides() {
        let number = |name: &str| last_number(name.as_bytes());
        assert_eq!(number("rank_17"), Some(17));
        assert_eq!(number("rank_17.pt"), Some(17));
        assert_eq!(number("step100-rank007.ckpt"), Some(7));
        assert_eq!(number("12"), Some(12));
        assert_eq!(number("latest"), None);
        assert_eq!(
            number("99999999999999999999999"),
            number("99999999999999999999999")
        );
    }

    #[test]
    fn names_without_a_number_take_turns() {
        let rule = Rule::new(3, "node");
        let mut seen: Vec<usize> = (0..3).map(|_| lane(&rule, "latest").0).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
        assert_eq!(rule.explain(OsStr::new("latest")), None);
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
            "line 2: there is no lane 2: they are 0 to 1"
        );
        assert!(error("x").starts_with("line 1: `x` has no lane"));
        assert!(error("x y").starts_with("line 1: `y` is not the number"));
        assert!(error("d/x 1").contains("has a slash"));
        assert!(error("[ 1").starts_with("line 1: `[`: "));
    }
}
