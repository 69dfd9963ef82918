//! Which hosts may be a host's partner, and in which order.
//!
//! Hosts are in a ring: failure domain by failure domain, and in each sorted by name with numbers by value (`n2` before
//! `n10`). The partner of a host is as many places further on as the largest domain has hosts, so that each host is the
//! partner of one, and of another domain. Without domains that is the next one by name.
//!
//! ```text
//!   domain a    domain b    domain c         largest: 2 hosts
//!   n1  n2   │  n3  n4   │  n5               n1 → n3 → n5 → n2 → n4 → n1
//! ```
//!
//! Where one domain has more than half of the hosts, its hosts share the others.
//!
//! A host that is gone hands its partner on: the next choice is the partner of the partner. So each host that is left
//! has a partner of its own, although no host knows all that are gone.

use std::cmp::Ordering;
use std::ops::Range;

use globset::{Glob, GlobMatcher};

/// The hosts that fail together.
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
pub(crate) struct PartnerCandidate {
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
    pub(crate) fn order(&self, this_host: &str, mut hosts: Vec<String>) -> Vec<PartnerCandidate> {
        hosts.push(this_host.to_owned());
        let ring = Ring::of(self, hosts);
        let own = ring.hosts.iter().position(|host| host == this_host);
        let own = own.expect("it was added");
        let mut order: Vec<usize> = Vec::new();
        let mut at = ring.partner_of(own);
        while at != own && !order.contains(&at) {
            order.push(at);
            at = ring.partner_of(at);
        }
        let count = ring.hosts.len();
        let others = (own + 1..own + count).map(|at| at % count);
        let others: Vec<usize> = others.filter(|at| !order.contains(at)).collect();
        order.extend(others);
        let mut candidates: Vec<PartnerCandidate> = order
            .into_iter()
            .map(|at| PartnerCandidate {
                is_near: self.fail_together(this_host, &ring.hosts[at]),
                host: ring.hosts[at].clone(),
            })
            .collect();
        candidates.sort_by_key(|candidate| candidate.is_near);
        candidates
    }
}

/// All hosts in their order.
struct Ring {
    hosts: Vec<String>,
    /// The largest failure domain.
    largest: Range<usize>,
}

impl Ring {
    fn of(domains: &Domains, mut hosts: Vec<String>) -> Self {
        hosts.sort_by(|a, b| compare_names(a, b));
        hosts.dedup();
        // A domain is where its first host is.
        let firsts: Vec<usize> = hosts
            .iter()
            .enumerate()
            .map(|(at, host)| {
                let is_with = |other: &String| domains.fail_together(host, other);
                hosts.iter().position(is_with).unwrap_or(at)
            })
            .collect();
        let mut order: Vec<usize> = (0..hosts.len()).collect();
        order.sort_by_key(|at| (firsts[*at], *at));
        let mut largest = 0..0;
        let mut start = 0;
        for domain in order.chunk_by(|a, b| firsts[*a] == firsts[*b]) {
            if domain.len() > largest.len() {
                largest = start..start + domain.len();
            }
            start += domain.len();
        }
        let hosts = order.into_iter().map(|at| hosts[at].clone()).collect();
        Self { hosts, largest }
    }

    fn partner_of(&self, at: usize) -> usize {
        let count = self.hosts.len();
        let others = count - self.largest.len();
        if others == 0 {
            return (at + 1) % count;
        }
        if 2 * self.largest.len() <= count {
            return (at + self.largest.len()) % count;
        }
        // The hosts of the largest domain and the others are each other's, the others over and over.
        let after = |place: usize| (self.largest.end + place) % count;
        if self.largest.contains(&at) {
            after((at - self.largest.start) % others)
        } else {
            self.largest.start + (at + count - self.largest.end) % count
        }
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

    /// The partner of each living host.
    fn partners(
        domains: &Domains,
        all: &[String],
        living: &[String],
    ) -> Vec<(String, PartnerCandidate)> {
        let partner = |host: &String| {
            let candidates = domains.order(host, all.to_vec()).into_iter();
            let mut living = candidates.filter(|candidate| living.contains(&candidate.host));
            (host.clone(), living.next().unwrap())
        };
        living.iter().map(partner).collect()
    }

    fn shares(partners: &[(String, PartnerCandidate)]) -> Vec<usize> {
        let mut shares = std::collections::BTreeMap::new();
        for (_, partner) in partners {
            *shares.entry(partner.host.clone()).or_insert(0) += 1;
        }
        shares.into_values().collect()
    }

    #[test]
    fn every_host_of_a_ring_is_the_partner_of_one() {
        let names = |count: usize| -> Vec<String> {
            (0..count).map(|n| format!("r{}-n{n}", n % 4)).collect()
        };
        let racks = Domains::parse("r0-* a\nr1-* b\nr[23]-* c\n").unwrap();
        for domains in [&Domains::default(), &racks] {
            // Half of the hosts are in the largest rack.
            for count in [4, 8, 20, 40] {
                let all = names(count);
                let partners = partners(domains, &all, &all);
                assert!(shares(&partners).iter().all(|share| *share == 1), "{count}");
                assert!(partners.iter().all(|(_, partner)| !partner.is_near));
            }
        }
        for host in &names(20) {
            let candidates = racks.order(host, names(20));
            assert_eq!(candidates.len(), 19);
            let near = candidates.iter().position(|candidate| candidate.is_near);
            assert!(
                candidates[near.unwrap()..]
                    .iter()
                    .all(|candidate| candidate.is_near)
            );
        }
    }

    #[test]
    fn a_rack_with_most_of_the_hosts_shares_the_others() {
        let all = hosts(&["a1", "a2", "a3", "a4", "a5", "a6", "b1", "c1", "c2"]);
        let domains = Domains::parse("a* a\nb* b\nc* c\n").unwrap();
        let partners = partners(&domains, &all, &all);
        assert!(partners.iter().all(|(_, partner)| !partner.is_near));
        let shares = shares(&partners);
        assert!(shares.iter().all(|share| *share <= 2), "{shares:?}");
    }

    #[test]
    fn whichever_hosts_go_those_that_are_left_are_each_the_partner_of_one() {
        let all: Vec<String> = (0..12).map(|n| format!("n{n}")).collect();
        for gone in 0..1 << 12_u32 {
            let living: Vec<String> = (0..12)
                .filter(|at| gone & (1 << at) == 0)
                .map(|at| all[at].clone())
                .collect();
            if living.len() > 1 {
                let partners = partners(&Domains::default(), &all, &living);
                assert!(
                    shares(&partners).iter().all(|share| *share == 1),
                    "{gone:b}"
                );
            }
        }
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
