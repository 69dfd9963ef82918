//! Messages of etcd's JSON gateway. In them, 64-bit numbers are strings, fields with the value zero are left out, and
//! bytes are base64.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum length in bytes of a host's name. A longer value is not shown as a name.
const HOST_BYTES_MAX: usize = 64;

/// Text that is encoded as etcd expects bytes.
pub(super) struct Text<'a>(pub(super) &'a str);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(self.0))
    }
}

/// Decodes a number that is a JSON string or a JSON number: the gateway of etcd writes 64-bit numbers as strings.
fn number<'de, D: Deserializer<'de>, N>(deserializer: D) -> Result<N, D::Error>
where
    N: std::str::FromStr + TryFrom<i64>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TextOrNumber {
        Text(String),
        Number(i64),
    }
    let number = match TextOrNumber::deserialize(deserializer)? {
        TextOrNumber::Text(text) => text.parse().ok(),
        TextOrNumber::Number(number) => number.try_into().ok(),
    };
    number.ok_or_else(|| serde::de::Error::custom("a number is expected"))
}

/// The header, which is part of every answer.
#[derive(Debug, Deserialize)]
pub(super) struct Header {
    #[serde(default, deserialize_with = "number")]
    revision: i64,
}

/// Answer to lease/grant.
#[derive(Debug, Deserialize)]
pub(super) struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl: u64,
}

/// Answer to lease/keepalive.
#[derive(Debug, Deserialize)]
pub(super) struct KeptAlive {
    pub(super) result: Lifetime,
}

/// The remaining lifetime of a lease in seconds; 0 if the lease has ended.
#[derive(Debug, Deserialize)]
pub(super) struct Lifetime {
    /// Every such answer has the id. Requiring it prevents another answer from being read as an ended lease.
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) _id: i64,
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    pub(super) ttl: u64,
}

/// Answer to kv/deleterange.
#[derive(Debug, Deserialize)]
pub(super) struct Deleted {
    #[serde(rename = "header")]
    pub(super) _header: Header,
}

/// Answer to kv/range.
#[derive(Debug, Deserialize)]
pub(super) struct Ranged {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
    #[serde(default)]
    more: bool,
}

#[derive(Debug, Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
}

/// Answer to kv/txn.
#[derive(Debug, Deserialize)]
pub(super) struct Txn {
    #[serde(default)]
    responses: Vec<TxnResponse>,
}

#[derive(Debug, Deserialize)]
struct TxnResponse {
    #[serde(default)]
    response_range: Option<Ranged>,
}

impl Txn {
    /// Returns the queue that the transaction read. Returns `None` if the answer has no queue.
    pub(super) fn into_queue(self) -> Option<Queue> {
        let mut responses = self.responses.into_iter();
        let range = responses.find_map(|response| response.response_range)?;
        Some(range.into_queue())
    }
}

/// The hosts that want a token, in the order of their requests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Queue {
    /// Revision of etcd's data at which the queue was read.
    pub(super) revision: i64,
    pub(super) members: Vec<Member>,
    /// Whether the queue has more members than were read.
    pub(super) is_truncated: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) key: String,
    /// Name of the member's host. `None` if the value is not a valid host name.
    pub(super) host: Option<String>,
}

impl Ranged {
    pub(super) fn into_queue(self) -> Queue {
        Queue {
            revision: self.header.revision,
            members: self.kvs.iter().filter_map(KeyValue::to_member).collect(),
            is_truncated: self.more,
        }
    }
}

impl KeyValue {
    /// Decodes a member of a queue. Returns `None` if the key is not UTF-8, which no key of Firn is.
    fn to_member(&self) -> Option<Member> {
        let is_host_name = |host: &String| {
            host.len() <= HOST_BYTES_MAX && host.chars().all(|char| char.is_ascii_graphic())
        };
        Some(Member {
            key: decode_text(&self.key)?,
            host: decode_text(&self.value).filter(is_host_name),
        })
    }
}

/// Decodes a text that [`Text`] encodes. Returns `None` if it is not base64 of UTF-8.
fn decode_text(base64: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(base64).ok()?;
    String::from_utf8(bytes).ok()
}
