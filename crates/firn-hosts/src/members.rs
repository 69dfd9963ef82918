//! The hosts that take part in a joint operation, as one of these hosts knows them.

/// The name of this host, and the hosts that are expected to take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Name of this host among the members: one path component.
    pub host: String,
    /// All expected members, including this host.
    pub expected: Expected,
}

/// The hosts that are expected to take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The number of hosts; any names are accepted.
    Count(usize),
    /// The names of the hosts.
    Hosts(Vec<String>),
}

/// Result of comparing the hosts that have joined with the expected members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberCheck {
    /// Hosts are missing.
    Incomplete {
        /// Number of hosts that are expected.
        expected: usize,
        /// Names of the missing hosts. A missing host is listed only if its name is known.
        missing: Vec<String>,
    },
    /// All expected hosts have joined, and no other host has.
    Complete,
    /// More hosts have joined than are expected.
    TooMany {
        /// Number of hosts that are expected.
        expected: usize,
    },
}

impl Members {
    /// Compares the hosts in `joined` with the expected members: hosts may be missing, all present, or more than
    /// expected.
    ///
    /// The members are expected by number or by name. If they are given by number only, `required` names hosts that
    /// must be in `joined`; it is ignored otherwise.
    pub fn check_joined(&self, joined: &[String], required: &[String]) -> MemberCheck {
        let (expected, required) = match &self.expected {
            Expected::Count(count) => (*count, required),
            Expected::Hosts(hosts) => (hosts.len(), hosts.as_slice()),
        };
        let missing: Vec<String> = required
            .iter()
            .filter(|host| !joined.contains(host))
            .cloned()
            .collect();
        if joined.len() < expected || !missing.is_empty() {
            return MemberCheck::Incomplete { expected, missing };
        }
        if joined.len() > expected {
            return MemberCheck::TooMany { expected };
        }
        MemberCheck::Complete
    }

    /// Returns whether `hosts` hosts are more than may take part. The answer is always false if the members are given
    /// by name.
    pub fn are_too_many(&self, hosts: usize) -> bool {
        match self.expected {
            Expected::Count(count) => hosts > count,
            Expected::Hosts(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn members(expected: Expected) -> Members {
        Members {
            host: "a".into(),
            expected,
        }
    }

    #[test]
    fn members_by_number_are_all_when_enough_came_and_the_required_ones_did() {
        let two = members(Expected::Count(2));
        let incomplete = |missing: &[&str]| MemberCheck::Incomplete {
            expected: 2,
            missing: hosts(missing),
        };
        assert_eq!(two.check_joined(&hosts(&["a"]), &[]), incomplete(&[]));
        assert_eq!(
            two.check_joined(&hosts(&["a", "b"]), &[]),
            MemberCheck::Complete
        );
        let required = hosts(&["c"]);
        assert_eq!(
            two.check_joined(&hosts(&["a", "b"]), &required),
            incomplete(&["c"])
        );
        let three = hosts(&["a", "b", "c"]);
        assert_eq!(
            two.check_joined(&three, &required),
            MemberCheck::TooMany { expected: 2 }
        );
        assert!(two.are_too_many(3) && !two.are_too_many(2));
    }

    #[test]
    fn members_by_name_are_all_when_each_of_them_came() {
        let named = members(Expected::Hosts(hosts(&["a", "b"])));
        let missing = MemberCheck::Incomplete {
            expected: 2,
            missing: hosts(&["b"]),
        };
        assert_eq!(named.check_joined(&hosts(&["a", "x"]), &[]), missing);
        assert_eq!(
            named.check_joined(&hosts(&["a", "b"]), &[]),
            MemberCheck::Complete
        );
    }
}
