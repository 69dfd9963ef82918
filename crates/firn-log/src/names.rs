//! The names of the files in a container, a directory with the logs of all hosts for one file. Each host writes files
//! of its own, with the host's name in their names.
//!
//! ```text
//! i-HOST-LIFE          index of HOST in this life (16 hexadecimal digits)
//! d-HOST-LIFE-LOG      data log (8 hexadecimal digits), with bytes of the file and nothing else
//! t-HOST-LIFE-FROM-TO  table: bytes FROM to TO of the index, sorted (16 hexadecimal digits each)
//! ```

use std::ops::Range;

use firn_trust::is_component;
use serde::{Deserialize, Serialize};

use crate::resolve::WriterId;

/// The writer of an index: a host in one of its lives. A host begins a new life each time it opens the container to
/// write.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Writer {
    host: String,
    life: u64,
}

impl Writer {
    /// Makes a writer. `host` must be valid as a component of a path.
    pub fn new(host: &str, life: u64) -> Self {
        debug_assert!(is_component(host.as_bytes()));
        Self {
            host: host.to_owned(),
            life,
        }
    }

    /// Returns the name of the host.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Returns whether a decoded writer has a valid host name.
    pub(crate) fn is_valid(&self) -> bool {
        is_component(self.host.as_bytes())
    }

    /// Returns the id by which all hosts order the changes of this writer.
    pub fn id(&self) -> WriterId {
        WriterId {
            host: xxhash_rust::xxh3::xxh3_64(self.host.as_bytes()),
            life: self.life,
        }
    }

    /// Returns the name of the index.
    pub(crate) fn index_name(&self) -> String {
        format!("i-{}-{:016x}", self.host, self.life)
    }

    /// Returns the name of a log.
    pub(crate) fn log_name(&self, log: u32) -> String {
        format!("d-{}-{:016x}-{log:08x}", self.host, self.life)
    }

    /// Returns the name of the table of a part of the index.
    pub(crate) fn table_name(&self, part: &Range<u64>) -> String {
        let Range { start, end } = part;
        format!("t-{}-{:016x}-{start:016x}-{end:016x}", self.host, self.life)
    }

    /// Parses the name of an index. Returns `None` if `name` is not one.
    pub(crate) fn from_index_name(name: &[u8]) -> Option<Self> {
        Self::parse(std::str::from_utf8(name).ok()?.strip_prefix("i-")?)
    }

    /// Parses the name of a table into its writer and the part of the index. Returns `None` if `name` is not one.
    pub(crate) fn parse_table_name(name: &[u8]) -> Option<(Self, Range<u64>)> {
        let name = std::str::from_utf8(name).ok()?.strip_prefix("t-")?;
        let (writer_and_start, end) = name.rsplit_once('-')?;
        let (writer, start) = writer_and_start.rsplit_once('-')?;
        let part = parse_hex(start)?..parse_hex(end)?;
        let writer = Self::parse(writer)?;
        (part.start < part.end).then_some((writer, part))
    }

    /// Parses the name of a log. Returns `None` if `name` is not one.
    fn from_log_name(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?.strip_prefix("d-")?;
        let (writer, _log) = name.rsplit_once('-')?;
        Self::parse(writer)
    }

    /// Parses the name of an index, a table or a log. A power loss may have removed any of a life's files and left the
    /// others.
    pub(crate) fn from_any_name(name: &[u8]) -> Option<Self> {
        Self::from_index_name(name)
            .or_else(|| Self::from_log_name(name))
            .or_else(|| Self::parse_table_name(name).map(|(writer, _)| writer))
    }

    /// Parses `HOST-LIFE`.
    fn parse(name: &str) -> Option<Self> {
        let (host, life) = name.rsplit_once('-')?;
        let writer = Self {
            host: host.to_owned(),
            life: parse_hex(life)?,
        };
        writer.is_valid().then_some(writer)
    }
}

/// Parses 16 lower-case hexadecimal digits.
fn parse_hex(digits: &str) -> Option<u64> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_valid = digits.len() == 16 && digits.bytes().all(is_digit);
    u64::from_str_radix(digits, 16).ok().filter(|_| is_valid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_written() {
        let writer = Writer::new("node-17.cluster", 0xabc);
        assert_eq!(writer.index_name(), "i-node-17.cluster-0000000000000abc");
        assert_eq!(
            Writer::from_index_name(writer.index_name().as_bytes()),
            Some(writer.clone())
        );
        assert_eq!(
            writer.log_name(2),
            "d-node-17.cluster-0000000000000abc-00000002"
        );
        let name = writer.table_name(&(0..0x1_2345));
        assert_eq!(
            name,
            "t-node-17.cluster-0000000000000abc-0000000000000000-0000000000012345"
        );
        let found = Some((writer.clone(), 0..0x1_2345));
        assert_eq!(Writer::parse_table_name(name.as_bytes()), found);
        for name in [
            writer.index_name(),
            writer.log_name(2),
            writer.table_name(&(0..0x1_2345)),
        ] {
            assert_eq!(Writer::from_any_name(name.as_bytes()), Some(writer.clone()));
        }
        assert_eq!(Writer::from_any_name(b"w-node-17.cluster"), None);
        for name in [
            "i-a",
            "i--0000000000000abc",
            "d-a-0000000000000abc",
            "i-a-0000000000000ABC",
            "i-../b-0000000000000abc",
        ] {
            assert_eq!(Writer::from_index_name(name.as_bytes()), None, "{name}");
            assert_eq!(Writer::parse_table_name(name.as_bytes()), None, "{name}");
        }
    }

    #[test]
    fn a_later_life_is_newer() {
        let life = |number| Writer::new("a", number).id();
        assert!(life(1) < life(2));
        assert_eq!(life(1).host, life(2).host);
    }
}
