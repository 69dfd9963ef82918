//! Who may be a host's partner, in which order.
//!
//! Hosts are in a ring, sorted by name with numbers by value (`n2` before `n10`). The ring begins after the host
//! itself. Those that fail together with it come last.

use std::cmp::Ordering;

use globset::{Glob, GlobMatcher};

/// Which hosts fail together.
#[derive(Debug, Default)]
pub struct Domains {
    lines: Vec<(GlobMatcher, String)>,
}

/// What is wrong with a file of failure domains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DomainsError {
    /// From 1.
    pub line: usize,
    /// What is wrong, and what to write.
    pub reason: String,
}

/// A host that may be the partner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) host: String,
    /// It fails together with the host that looks for a partner.
    pub(crate) is_near: bool,
}

impl Domains {
    /// Of the lines of a file: a pattern of host names, a space, the name of a domain.
    pub fn parse(text: &str) -> Result<Self, DomainsError> {
        let mut lines = Vec::new();
        for (line, text) in (1..).zip(text.lines().map(str::trim)) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let parsed = parse_line(text).map_err(|reason| DomainsError { line, reason })?;
            lines.push(parsed);
        }
        Ok(Self { lines })
    }

    /// The domain of a host; none: it fails alone.
    fn domain_of(&self, host: &str) -> Option<&str> {
        let line = self
            .lines
            .iter()
            .find(|(pattern, _)| pattern.is_match(host));
        line.map(|(_, domain)| domain.as_str())
    }

    fn fail_together(&self, a: &str, b: &str) -> bool {
        self.domain_of(a)
            .is_some_and(|domain| self.domain_of(b) == Some(domain))
    }

    /// The other hosts, the one to ask first before the others.
    pub(crate) fn order(&self, this_host: &str, hosts: Vec<String>) -> Vec<Candidate> {
        let mut others: Vec<Candidate> = hosts
            .into_iter()
            .filter(|host| host != this_host)
            .map(|host| Candidate {
                is_near: self.fail_together(this_host, &host),
                host,
            })
            .collect();
        let is_before = |host: &str| compare_names(host, this_host) == Ordering::Less;
        others.sort_by(|a, b| {
            (a.is_near, is_before(&a.host))
                .cmp(&(b.is_near, is_before(&b.host)))
                .then_with(|| compare_names(&a.host, &b.host))
        });
        others.dedup();
        others
    }
}

fn parse_line(line: &str) -> Result<(GlobMatcher, String), String> {
    let mut words = line.split_whitespace();
    let (Some(pattern), Some(domain), None) = (words.next(), words.next(), words.next()) else {
        return Err(format!(
            "`{line}` is not a pattern of host names, a space and the name of a domain, such as `r1-* rack1`"
        ));
    };
    let glob = Glob::new(pattern).map_err(|error| format!("`{pattern}`: {}", error.kind()))?;
    Ok((glob.compile_matcher(), domain.to_owned()))
}

/// By characters, and numbers by their values; names that differ are never equal.
fn compare_names(a: &str, b: &str) -> Ordering {
    let parts = |name: &str| {
        let mut parts: Vec<(String, u128)> = vec![(String::new(), 0)];
        for character in name.chars() {
            let (text, number) = parts.last_mut().expect("there is one");
            match character.to_digit(10) {
                Some(digit) => {
                    *number = number
                        .saturating_mul(10)
                        .saturating_add(u128::from(digit) + u128::from(*number == 0));
                }
                None if *number > 0 => parts.push((character.to_string(), 0)),
                None => text.push(character),
            }
        }
        parts
    };
    parts(a).cmp(&parts(b)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn order(domains: &str, this_host: &str, names: &[&str]) -> Vec<String> {
        let domains = Domains::parse(domains).unwrap();
        let candidates = domains.order(this_host, hosts(names)).into_iter();
        candidates.map(|candidate| candidate.host).collect()
    }

    #[test]
    fn the_next_host_is_the_first_and_numbers_count_by_value() {
        let all = ["n10", "n2", "n1", "n3"];
        assert_eq!(order("", "n2", &all), ["n3", "n10", "n1"]);
        assert_eq!(order("", "n10", &all), ["n1", "n2", "n3"]);
        assert_eq!(order("", "alone", &["alone"]), [""; 0]);
        assert_eq!(
            order("", "c0-0c1s2n3", &["c0-0c1s10n0", "c0-0c1s2n3"]),
            ["c0-0c1s10n0"]
        );
    }

    #[test]
    fn every_host_of_a_ring_is_the_partner_of_one() {
        let all: Vec<String> = (0..20).map(|n| format!("r{}-n{n}", n % 4)).collect();
        let domains = Domains::parse("r0-* a\nr1-* b\nr[23]-* c\n").unwrap();
        for host in &all {
            let candidates = domains.order(host, all.clone());
            assert_eq!(candidates.len(), all.len() - 1);
            assert!(!domains.fail_together(host, &candidates[0].host));
            let near = candidates.iter().position(|candidate| candidate.is_near);
            assert!(
                candidates[near.unwrap()..]
                    .iter()
                    .all(|candidate| candidate.is_near)
            );
        }
        let firsts: std::collections::BTreeSet<_> = all
            .iter()
            .map(|host| Domains::default().order(host, all.clone())[0].host.clone())
            .collect();
        assert_eq!(firsts.len(), all.len());
    }

    #[test]
    fn a_host_outside_the_failure_domain_comes_before_a_nearer_one() {
        let domains = "# racks\n\nn[12] rack1\nn* rack2\n";
        assert_eq!(order(domains, "n1", &["n1", "n2", "n3"]), ["n3", "n2"]);
        assert_eq!(
            order(domains, "n3", &["n1", "n2", "n3", "n4"]),
            ["n1", "n2", "n4"]
        );
        // Hosts that no line names fail alone.
        assert_eq!(order("x* rack\n", "n1", &["n2", "n1"]), ["n2"]);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, line, word) in [
            ("n1", 1, "`n1`"),
            ("# x\nn1 rack 2", 2, "rack 2"),
            ("a b\n\nn[1 rack", 3, "n[1"),
        ] {
            let error = Domains::parse(text).unwrap_err();
            assert_eq!(error.line, line);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
