//! The order in which a host asks other hosts to be its *partner*, which keeps copies of the files that the host has in
//! memory only.
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
    /// The lines of the file. The first rule that matches a name decides.
    rules: Vec<DomainRule>,
}

/// A line of a file of failure domains.
#[derive(Debug)]
struct DomainRule {
    /// Pattern of host names.
    pattern: GlobMatcher,
    domain: String,
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
    pub(crate) is_in_same_domain: bool,
}

impl Domains {
    /// Parses a file of failure domains. Each line has a pattern of host names, a space, and the name of a domain.
    /// Empty lines and lines that begin with `#` are ignored.
    pub fn parse(text: &str) -> Result<Self, DomainsError> {
        let mut rules = Vec::new();
        for (line_number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let rule = parse_rule(line).map_err(|reason| DomainsError {
                line: line_number,
                reason,
            })?;
            rules.push(rule);
        }
        Ok(Self { rules })
    }

    /// Returns the domain of a host. Returns `None` if the host is in no domain and therefore fails alone.
    fn domain_of(&self, host: &str) -> Option<&str> {
        let mut rules = self.rules.iter();
        let rule = rules.find(|rule| rule.pattern.is_match(host))?;
        Some(&rule.domain)
    }

    fn fail_together(&self, host_a: &str, host_b: &str) -> bool {
        match self.domain_of(host_a) {
            Some(domain) => self.domain_of(host_b) == Some(domain),
            None => false,
        }
    }

    /// Returns all other hosts in the order in which to ask them. Hosts of the same failure domain come last.
    pub(crate) fn order(&self, this_host: &str, mut hosts: Vec<String>) -> Vec<PartnerCandidate> {
        hosts.push(this_host.to_owned());
        let ring = Ring::new(self, hosts);
        let mut candidates: Vec<PartnerCandidate> = ring
            .other_hosts(this_host)
            .into_iter()
            .map(|host| PartnerCandidate {
                is_in_same_domain: self.fail_together(this_host, &host),
                host,
            })
            .collect();
        // The sort is stable, so each of the two groups retains its order.
        candidates.sort_by_key(|candidate| candidate.is_in_same_domain);
        candidates
    }
}

/// All hosts in the order of the ring.
struct Ring {
    hosts: Vec<String>,
    /// Indexes of the hosts of the largest failure domain.
    largest_domain: Range<usize>,
}

impl Ring {
    /// Makes the ring of some hosts, by which each host finds its partner, the host that keeps copies of its files.
    ///
    /// Hosts of one failure domain (hosts that fail together) are neighbors, sorted by name. For example, domains a
    /// and b make the ring `a1 a2 | b1 b2`. A host usually has its partner as many places further as the largest domain
    /// has hosts: here 2, so a1 has the partner b1.
    fn new(domains: &Domains, mut hosts: Vec<String>) -> Self {
        hosts.sort_by(|a, b| compare_names(a, b));
        hosts.dedup();
        // A domain is identified by the index of its first host, and domains are sorted by it.
        let first_of_domain = first_hosts_of_domains(domains, &hosts);
        let mut ring_order: Vec<usize> = (0..hosts.len()).collect();
        ring_order.sort_by_key(|host_index| (first_of_domain[*host_index], *host_index));

        let mut largest_domain = 0..0;
        let mut domain_start = 0;
        for domain in ring_order.chunk_by(|a, b| first_of_domain[*a] == first_of_domain[*b]) {
            let domain_end = domain_start + domain.len();
            if domain.len() > largest_domain.len() {
                largest_domain = domain_start..domain_end;
            }
            domain_start = domain_end;
        }
        Self {
            hosts: ring_order
                .into_iter()
                .map(|index| hosts[index].clone())
                .collect(),
            largest_domain,
        }
    }

    /// Returns all hosts but `this_host`, which is in the ring, in the order in which it asks them to be its partner
    /// (to keep copies of its files).
    ///
    /// First comes the partner of `this_host`, then the partner's partner, and so on. This chain may not reach all
    /// hosts; the others follow in the order of the ring.
    fn other_hosts(&self, this_host: &str) -> Vec<String> {
        let own_index = self.hosts.iter().position(|host| host == this_host);
        let own_index = own_index.expect("this host is in the ring");
        let mut indexes: Vec<usize> = Vec::new();
        let mut partner_index = self.partner_of(own_index);
        while partner_index != own_index && !indexes.contains(&partner_index) {
            indexes.push(partner_index);
            partner_index = self.partner_of(partner_index);
        }
        let host_count = self.hosts.len();
        for distance in 1..host_count {
            let index = (own_index + distance) % host_count;
            if !indexes.contains(&index) {
                indexes.push(index);
            }
        }
        let hosts = indexes.into_iter().map(|index| self.hosts[index].clone());
        hosts.collect()
    }

    /// Returns the index in the ring of the partner of the host at `index`: the host that keeps copies of its files.
    /// The two are in different failure domains (hosts that fail together) if there are several domains.
    fn partner_of(&self, index: usize) -> usize {
        let host_count = self.hosts.len();
        let largest_domain = &self.largest_domain;
        let outside_count = host_count - largest_domain.len();
        // There is only one domain: the next host is the partner.
        if outside_count == 0 {
            return (index + 1) % host_count;
        }
        // A step of this length leads out of each domain, because none is longer.
        if largest_domain.len() <= outside_count {
            return (index + largest_domain.len()) % host_count;
        }
        // The largest domain has more hosts than all other domains together. Its hosts use the hosts outside as
        // partners in turn. Each host outside uses a host of the largest domain.
        if largest_domain.contains(&index) {
            let outside_position = (index - largest_domain.start) % outside_count;
            (largest_domain.end + outside_position) % host_count
        } else {
            let outside_position = (index + host_count - largest_domain.end) % host_count;
            largest_domain.start + outside_position
        }
    }
}

/// Returns for each host the index of the first host of its domain. For a host without a domain, this is its own index.
fn first_hosts_of_domains(domains: &Domains, hosts: &[String]) -> Vec<usize> {
    let mut first_of_domain = Vec::with_capacity(hosts.len());
    for (index, host) in hosts.iter().enumerate() {
        let is_in_same_domain = |other_host: &String| domains.fail_together(host, other_host);
        let first_index = hosts.iter().position(is_in_same_domain);
        first_of_domain.push(first_index.unwrap_or(index));
    }
    first_of_domain
}

/// Parses a line of a file of failure domains. An error says what to write instead.
fn parse_rule(line: &str) -> Result<DomainRule, String> {
    let mut words = line.split_whitespace();
    let (Some(pattern), Some(domain), None) = (words.next(), words.next(), words.next()) else {
        return Err(format!(
            "expected a pattern of host names, a space and the name of a domain, such as `r1-* rack1`, found `{line}`"
        ));
    };
    let glob = Glob::new(pattern).map_err(|error| format!("`{pattern}`: {}", error.kind()))?;
    Ok(DomainRule {
        pattern: glob.compile_matcher(),
        domain: domain.to_owned(),
    })
}

/// A part of a host's name: a text, and the number that follows it. Parts are compared by their text first.
#[derive(Default, PartialEq, Eq, PartialOrd, Ord)]
struct NamePart {
    text: String,
    /// `None` if no number follows, which sorts before every number.
    number: Option<u128>,
}

/// Compares names of hosts by characters, and numbers in them by value. Different names are never equal: if only the
/// form of numbers differs, as in `n1` and `n01`, the names are compared as texts.
fn compare_names(a: &str, b: &str) -> Ordering {
    name_parts(a).cmp(&name_parts(b)).then_with(|| a.cmp(b))
}

/// Divides a host's name after each number, so that names compare by the values of their numbers: `n2` is before `n10`.
/// Each part has a text and the number after it; the last part may have no number.
fn name_parts(name: &str) -> Vec<NamePart> {
    let mut parts = Vec::new();
    let mut part = NamePart::default();
    for character in name.chars() {
        if let Some(digit) = character.to_digit(10) {
            let number_before = part.number.unwrap_or(0);
            let number = number_before.saturating_mul(10);
            part.number = Some(number.saturating_add(u128::from(digit)));
            continue;
        }
        if part.number.is_some() {
            parts.push(std::mem::take(&mut part));
        }
        part.text.push(character);
    }
    parts.push(part);
    parts
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

    /// Each leading zero counted as a digit, so `n01` sorted after `n9`.
    #[test]
    fn regression_leading_zeros_do_not_change_the_value_of_a_number() {
        let all = ["n9", "n01", "n1", "n010", "n0", "n"];
        // `n01` and `n1` have the same value, so their texts decide.
        assert_eq!(order("", "n9", &all), ["n010", "n", "n0", "n01", "n1"]);
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
                assert!(
                    partners
                        .iter()
                        .all(|(_, partner)| !partner.is_in_same_domain)
                );
            }
        }
        for host in &names(20) {
            let candidates = racks.order(host, names(20));
            assert_eq!(candidates.len(), 19);
            let near = candidates
                .iter()
                .position(|candidate| candidate.is_in_same_domain);
            assert!(
                candidates[near.unwrap()..]
                    .iter()
                    .all(|candidate| candidate.is_in_same_domain)
            );
        }
    }

    #[test]
    fn a_rack_with_most_of_the_hosts_shares_the_others() {
        let all = hosts(&["a1", "a2", "a3", "a4", "a5", "a6", "b1", "c1", "c2"]);
        let domains = Domains::parse("a* a\nb* b\nc* c\n").unwrap();
        let partners = partners(&domains, &all, &all);
        assert!(
            partners
                .iter()
                .all(|(_, partner)| !partner.is_in_same_domain)
        );
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
