//! Which hosts take part in something, as one of them sees them.

/// This host and the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Name of this host among them: one component of a path.
    pub host: String,
    /// All of them, this one included.
    pub expected: Expected,
}

/// The hosts that are expected to take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// This many, of any name.
    Count(usize),
    /// These, by name.
    Hosts(Vec<String>),
}

/// Whether all members have come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attendance {
    /// Hosts are missing.
    Incomplete {
        /// How many it will be.
        expected: usize,
        /// The names of those that have not come, where they are known.
        missing: Vec<String>,
    },
    /// All, and no others.
    Complete,
    /// More than take part.
    TooMany {
        /// How many take part.
        expected: usize,
    },
}

impl Members {
    /// Whether the hosts that have come are all. `known`: hosts that must be among them where only their number is known.
    pub fn attendance(&self, come: &[String], known: &[String]) -> Attendance {
        let (expected, names) = match &self.expected {
            Expected::Count(count) => (*count, known),
            Expected::Hosts(hosts) => (hosts.len(), hosts.as_slice()),
        };
        let missing: Vec<String> = names
            .iter()
            .filter(|host| !come.contains(host))
            .cloned()
            .collect();
        if come.len() < expected || !missing.is_empty() {
            Attendance::Incomplete { expected, missing }
        } else if come.len() > expected {
            Attendance::TooMany { expected }
        } else {
            Attendance::Complete
        }
    }

    /// Whether `hosts` hosts are more than may take part. Hosts that are expected by name are never too many.
    pub fn are_too_many(&self, hosts: usize) -> bool {
        matches!(self.expected, Expected::Count(count) if hosts > count)
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
        let incomplete = |missing: &[&str]| Attendance::Incomplete {
            expected: 2,
            missing: hosts(missing),
        };
        assert_eq!(two.attendance(&hosts(&["a"]), &[]), incomplete(&[]));
        assert_eq!(
            two.attendance(&hosts(&["a", "b"]), &[]),
            Attendance::Complete
        );
        let known = hosts(&["c"]);
        assert_eq!(
            two.attendance(&hosts(&["a", "b"]), &known),
            incomplete(&["c"])
        );
        let three = hosts(&["a", "b", "c"]);
        assert_eq!(
            two.attendance(&three, &known),
            Attendance::TooMany { expected: 2 }
        );
        assert!(two.are_too_many(3) && !two.are_too_many(2));
    }

    #[test]
    fn members_by_name_are_all_when_each_of_them_came() {
        let named = members(Expected::Hosts(hosts(&["a", "b"])));
        let missing = Attendance::Incomplete {
            expected: 2,
            missing: hosts(&["b"]),
        };
        assert_eq!(named.attendance(&hosts(&["a", "x"]), &[]), missing);
        assert_eq!(
            named.attendance(&hosts(&["a", "b"]), &[]),
            Attendance::Complete
        );
    }
}
