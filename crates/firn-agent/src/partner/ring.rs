//! The order in which a host asks other hosts to be its partner.
//!
//! All hosts form a ring. A *failure domain* is a set of hosts that fail together, such as a rack. The ring has the
//! domains one after the other. Within a domain the hosts are sorted by name; numbers in names are compared by value
//! (`n2` before `n10`).
//!
//! The partner of a host is *k* places later in the ring, where *k* is the number of hosts of the largest domain. Each
//! host is therefore the partner of exactly one other host, and the two are in different domains. Without domains *k*
//! is 1.
//!
//! ```text
//!   domain a    domain b    domain c         largest domain: 2 hosts
//!   n1  n2   │  n3  n4   │  n5               n1 → n3 → n5 → n2 → n4 → n1
//! ```
//!
//! If one domain has more than half of the hosts, its hosts share the hosts of the other domains as partners.
//!
//! If the partner does not answer, the next choice is the partner's own partner, and so on. The remaining hosts then
//! still have one partner each, and no host needs to know which other hosts are gone.

use std::cmp::Ordering;
use std::ops::Range;

use globset::{Glob, GlobMatcher};

/// The failure domains of hosts.
#[derive(Debug, Default)]
pub struct Domains {
    /// Patterns of host names, each with its domain. The first pattern that matches a name decides.
    lines: Vec<(GlobMatcher, String)>,
}

/// Error in a file of failure domains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DomainsError {
    /// Number of the line, from 1.
    pub line: usize,
    /// The error, and what to write instead.
    pub reason: String,
}

/// A host that may be the partner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartnerCandidate {
    pub(crate) host: String,
    /// Whether this host is in the failure domain of the host that looks for a partner.
    pub(crate) is_near: bool,
}

impl Domains {
    /// Parses a file of failure domains. Each line has a pattern of host names, a space, and the name of a domain.
    /// Empty lines and lines that begin with `#` are ignored.
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

    /// Returns the domain of a host; `None` if the host is in no domain and therefore fails alone.
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

    /// Returns all other hosts in the order in which to ask them. Hosts of the same failure domain come last.
    pub(crate) fn order(&self, this_host: &str, mut hosts: Vec<String>) -> Vec<PartnerCandidate> {
        hosts.push(this_host.to_owned());
        let ring = Ring::of(self, hosts);
        let own_index = ring.hosts.iter().position(|host| host == this_host);
        let own_index = own_index.expect("this host was added");
        // First the partner, then the partner's partner, and so on. This chain may not reach all hosts.
        let mut order: Vec<usize> = Vec::new();
        let mut index = ring.partner_of(own_index);
        while index != own_index && !order.contains(&index) {
            order.push(index);
            index = ring.partner_of(index);
        }
        let count = ring.hosts.len();
        let others = (own_index + 1..own_index + count).map(|index| index % count);
        let others: Vec<usize> = others.filter(|index| !order.contains(index)).collect();
        order.extend(others);
        let mut candidates: Vec<PartnerCandidate> = order
            .into_iter()
            .map(|index| PartnerCandidate {
                is_near: self.fail_together(this_host, &ring.hosts[index]),
                host: ring.hosts[index].clone(),
            })
            .collect();
        // The sort is stable, so each of the two groups retains its order.
        candidates.sort_by_key(|candidate| candidate.is_near);
        candidates
    }
}

/// All hosts in the order of the ring.
struct Ring {
    hosts: Vec<String>,
    /// Indexes of the hosts of the largest failure domain.
    largest: Range<usize>,
}

impl Ring {
    /// Makes the ring of some hosts.
    fn of(domains: &Domains, mut hosts: Vec<String>) -> Self {
        hosts.sort_by(|a, b| compare_names(a, b));
        hosts.dedup();
        // For each host, the index of the first host of its domain. Domains are sorted by this index.
        let first_of_domain: Vec<usize> = hosts
            .iter()
            .enumerate()
            .map(|(index, host)| {
                let is_same_domain = |other: &String| domains.fail_together(host, other);
                hosts.iter().position(is_same_domain).unwrap_or(index)
            })
            .collect();
        let mut order: Vec<usize> = (0..hosts.len()).collect();
        order.sort_by_key(|index| (first_of_domain[*index], *index));
        let mut largest = 0..0;
        let mut start = 0;
        for domain in order.chunk_by(|a, b| first_of_domain[*a] == first_of_domain[*b]) {
            if domain.len() > largest.len() {
                largest = start..start + domain.len();
            }
            start += domain.len();
        }
        let hosts = order
            .into_iter()
            .map(|index| hosts[index].clone())
            .collect();
        Self { hosts, largest }
    }

    /// Returns the index of the partner of the host at `index`.
    fn partner_of(&self, index: usize) -> usize {
        let count = self.hosts.len();
        let others = count - self.largest.len();
        if others == 0 {
            return (index + 1) % count;
        }
        if 2 * self.largest.len() <= count {
            return (index + self.largest.len()) % count;
        }
        // The largest domain has more hosts than all other domains together. Its hosts use the other hosts as partners in
        // turn. Each of the other hosts uses a host of the largest domain.
        let other_host = |position: usize| (self.largest.end + position) % count;
        if self.largest.contains(&index) {
            other_host((index - self.largest.start) % others)
        } else {
            self.largest.start + (index + count - self.largest.end) % count
        }
    }
}

/// Parses a line of a file of failure domains into its pattern and its domain. An error says what to write.
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

/// Compares names of hosts by characters, and numbers in them by value. Different names are never equal: if only the
/// form of numbers differs, as in `n1` and `n01`, the names are compared as texts.
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
    fn the_next_host_comes_first_and_numbers_count_by_value() {
        let all = ["n10", "n2", "n1", "n3"];
        assert_eq!(order("", "n2", &all), ["n3", "n10", "n1"]);
        assert_eq!(order("", "n10", &all), ["n1", "n2", "n3"]);
        assert_eq!(order("", "alone", &["alone"]), [""; 0]);
        assert_eq!(
            order("", "c0-0c1s2n3", &["c0-0c1s10n0", "c0-0c1s2n3"]),
            ["c0-0c1s10n0"]
        );
    }

    /// Returns each living host with its partner.
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

    /// Returns how many hosts each partner serves.
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
    fn after_any_losses_each_remaining_host_is_the_partner_of_one() {
        let all: Vec<String> = (0..12).map(|n| format!("n{n}")).collect();
        for lost_bits in 0..1 << 12_u32 {
            let living: Vec<String> = (0..12)
                .filter(|index| lost_bits & (1 << index) == 0)
                .map(|index| all[index].clone())
                .collect();
            if living.len() > 1 {
                let partners = partners(&Domains::default(), &all, &living);
                assert!(
                    shares(&partners).iter().all(|share| *share == 1),
                    "{lost_bits:b}"
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
        // Hosts that no line matches fail alone.
        assert_eq!(order("x* rack\n", "n1", &["n2", "n1"]), ["n2"]);
    }

    #[test]
    fn an_error_names_its_line() {
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
