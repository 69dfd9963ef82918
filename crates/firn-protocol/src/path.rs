//! Paths in messages: any bytes, as the kernel allows them.
//!
//! In JSON a UTF-8 path is a string. Any other path is an object such as `{"escaped":"caf\\xe9"}`. In its string, each
//! byte that is not UTF-8 is `\x` with two hexadecimal digits, each backslash is doubled, and all else is unchanged.
//!
//! Invariant: both forms are exact. Different paths have different JSON, and each path is read as it was written.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use firn_format::quote::quoted;

/// Key of the object for a path that is not UTF-8.
const ESCAPED: &str = "escaped";

/// A path or name, as bytes. For readers it is shown quoted (`firn_format::quote`).
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BytePath(Vec<u8>);

impl BytePath {
    /// Returns the bytes of the path.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the path as a [`Path`].
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// Returns whether the path is empty. An empty path below a mount point is the mount point itself.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<u8>> for BytePath {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<&[u8]> for BytePath {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl From<&str> for BytePath {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for BytePath {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&Path> for BytePath {
    fn from(path: &Path) -> Self {
        Self(path.as_os_str().as_bytes().to_vec())
    }
}

impl From<PathBuf> for BytePath {
    fn from(path: PathBuf) -> Self {
        Self(path.into_os_string().into_vec())
    }
}

impl From<BytePath> for PathBuf {
    fn from(path: BytePath) -> Self {
        OsString::from_vec(path.0).into()
    }
}

impl AsRef<Path> for BytePath {
    fn as_ref(&self) -> &Path {
        self.as_path()
    }
}

impl PartialEq<str> for BytePath {
    fn eq(&self, other: &str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl PartialEq<&str> for BytePath {
    fn eq(&self, other: &&str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl PartialEq<String> for BytePath {
    fn eq(&self, other: &String) -> bool {
        self.0 == other.as_bytes()
    }
}

/// Shows the path quoted, for readers.
impl fmt::Display for BytePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&quoted(&self.0))
    }
}

impl fmt::Debug for BytePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl Serialize for BytePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => {
                let mut object = serializer.serialize_struct("BytePath", 1)?;
                object.serialize_field(ESCAPED, &escaped(&self.0))?;
                object.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for BytePath {
    /// Reads a path: a string, or an object `{"escaped": …}` with a path that is not UTF-8.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathVisitor;

        impl<'de> Visitor<'de> for PathVisitor {
            type Value = BytePath;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or {\"escaped\": …} for one that is not UTF-8")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<BytePath, E> {
                Ok(text.into())
            }

            fn visit_string<E: Error>(self, text: String) -> Result<BytePath, E> {
                Ok(text.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BytePath, A::Error> {
                let key: Option<String> = map.next_key()?;
                if key.as_deref() != Some(ESCAPED) {
                    return Err(A::Error::missing_field(ESCAPED));
                }
                let text: String = map.next_value()?;
                if let Some(second_key) = map.next_key::<String>()? {
                    return Err(A::Error::unknown_field(&second_key, &[ESCAPED]));
                }
                match unescaped(&text) {
                    Some(bytes) => Ok(BytePath(bytes)),
                    None => Err(A::Error::invalid_value(
                        Unexpected::Str(&text),
                        &"\\\\ or \\x and two digits",
                    )),
                }
            }
        }

        deserializer.deserialize_any(PathVisitor)
    }
}

/// Escapes bytes as text. [`unescaped`] is the inverse.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 8);
    for chunk in bytes.utf8_chunks() {
        text.push_str(&chunk.valid().replace('\\', "\\\\"));
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// Returns the bytes that an escaped text stands for. Returns `None` if a backslash is followed neither by a backslash
/// nor by `x` and two hexadecimal digits.
pub fn unescaped(text: &str) -> Option<Vec<u8>> {
    let hex_digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(text.len());
    let mut remaining = text.as_bytes();
    loop {
        match *remaining {
            [] => return Some(bytes),
            [b'\\', b'\\', ref tail @ ..] => {
                bytes.push(b'\\');
                remaining = tail;
            }
            [b'\\', b'x', high, low, ref tail @ ..] => {
                bytes.push((hex_digit(high)? << 4 | hex_digit(low)?) as u8);
                remaining = tail;
            }
            [b'\\', ..] => return None,
            [byte, ref tail @ ..] => {
                bytes.push(byte);
                remaining = tail;
            }
        }
    }
}

/// Writes and reads a [`PathBuf`] in the form of a [`BytePath`], for `#[serde(with = …)]`. Serde's form of a
/// [`PathBuf`] refuses a path that is not UTF-8.
pub mod exact {
    use super::{BytePath, Deserialize, Deserializer, Path, PathBuf, Serialize, Serializer};

    /// Writes the path.
    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        BytePath::from(path).serialize(serializer)
    }

    /// Reads the path.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        BytePath::deserialize(deserializer).map(PathBuf::from)
    }
}

/// Like [`exact`], for a path that may be missing.
pub mod exact_option {
    use super::{BytePath, Deserialize, Deserializer, PathBuf, Serialize, Serializer};

    /// Writes the path, or null.
    pub fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        path.as_deref().map(BytePath::from).serialize(serializer)
    }

    /// Reads the path, or null.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<BytePath>::deserialize(deserializer)?.map(PathBuf::from))
    }
}

/// Like [`exact`], for a list of paths.
pub mod exact_list {
    use super::{BytePath, Deserialize, Deserializer, PathBuf, Serializer};

    /// Writes the paths.
    pub fn serialize<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(paths.iter().map(|path| BytePath::from(path.as_path())))
    }

    /// Reads the paths.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<PathBuf>, D::Error> {
        let paths = Vec::<BytePath>::deserialize(deserializer)?;
        Ok(paths.into_iter().map(PathBuf::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn json(path: &[u8]) -> String {
        serde_json::to_string(&BytePath::from(path)).unwrap()
    }

    #[test]
    fn what_is_utf_8_is_a_string_and_all_else_an_object() {
        assert_eq!(json(b"step_100/rank0"), "\"step_100/rank0\"");
        assert_eq!(json("Prüfpunkt\\x\n".as_bytes()), r#""Prüfpunkt\\x\n""#);
        assert_eq!(json(b"caf\xe9"), r#"{"escaped":"caf\\xe9"}"#);
        assert_eq!(
            json(b"\\xe9\xe9\n\xc3\xa9"),
            r#"{"escaped":"\\\\xe9\\xe9\né"}"#
        );
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for text in [
            r#"{"escaped":"\\"}"#,
            r#"{"escaped":"\\x"}"#,
            r#"{"escaped":"\\xe"}"#,
            r#"{"escaped":"\\xgg"}"#,
            r#"{"escaped":"\\x+1"}"#,
            r#"{"escaped":"\\n"}"#,
            r#"{"escaped":"\\XE9"}"#,
            r#"{"escaped":"a","other":"b"}"#,
            r#"{"other":"a"}"#,
            r#"{"escaped":7}"#,
            "{}",
            "7",
            "null",
            "[97]",
        ] {
            assert!(serde_json::from_str::<BytePath>(text).is_err(), "{text}");
        }
        let by_hand: BytePath = serde_json::from_str(r#"{"escaped":"\\x61/\\xE9"}"#).unwrap();
        assert_eq!(by_hand.as_bytes(), b"a/\xe9");
    }

    #[test]
    fn paths_that_look_alike_stay_apart() {
        let names: [&[u8]; 6] = [
            b"\xff",
            "\u{fffd}".as_bytes(),
            b"\\xff",
            b"{\"escaped\":\"\\\\xff\"}",
            b"\xfe",
            b"",
        ];
        let written: std::collections::HashSet<_> = names.iter().map(|name| json(name)).collect();
        assert_eq!(written.len(), names.len());
    }

    proptest! {
        #[test]
        fn every_path_is_read_as_it_was_written(bytes: Vec<u8>, text in "[\\\\x0-9a-f\u{0}-\u{ff}]{0,20}") {
            for bytes in [bytes, text.into_bytes()] {
                let path = BytePath::from(bytes);
                let written = serde_json::to_string(&path).unwrap();
                prop_assert!(!written.contains('\n'));
                prop_assert_eq!(&serde_json::from_str::<BytePath>(&written).unwrap(), &path);
                prop_assert_eq!(PathBuf::from(path.clone()), path.as_path());
            }
        }

        #[test]
        fn mostly_broken_text_is_read_as_it_was_written(bytes in prop::collection::vec(prop_oneof![Just(b'\\'), Just(b'x'), Just(0xe9), Just(0xc3), any::<u8>()], 0..24)) {
            let path = BytePath::from(bytes);
            let written = serde_json::to_string(&path).unwrap();
            prop_assert_eq!(serde_json::from_str::<BytePath>(&written).unwrap(), path);
        }
    }
}
