//! What etcd's JSON gateway says. Numbers of 64 bits are strings there, zero is left out, and bytes are base64.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes of a host's name that are believed.
const HOST_BYTES_MAX: usize = 64;

/// Text as etcd wants its bytes.
pub(super) struct Text<'a>(pub(super) &'a str);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(self.0))
    }
}

fn number<'de, D: Deserializer<'de>, N>(deserializer: D) -> Result<N, D::Error>
where
    N: std::str::FromStr + TryFrom<i64>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Text(String),
        Number(i64),
    }
    let number = match Either::deserialize(deserializer)? {
        Either::Text(text) => text.parse().ok(),
        Either::Number(number) => number.try_into().ok(),
    };
    number.ok_or_else(|| serde::de::Error::custom("a number is expected"))
}

/// Every answer has one.
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

/// Seconds that a lease lives; none if it does not.
#[derive(Debug, Deserialize)]
pub(super) struct Lifetime {
    /// There in each answer, so that another answer is not taken for a lease that ended.
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
    /// The queue that it read; `None`: it read none.
    pub(super) fn into_queue(self) -> Option<Queue> {
        let mut ranges = self
            .responses
            .into_iter()
            .filter_map(|part| part.response_range);
        ranges.next().map(Ranged::into_queue)
    }
}

/// The hosts that want a token, in their order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Queue {
    /// State of etcd in which it was so.
    pub(super) revision: i64,
    pub(super) members: Vec<Member>,
    /// There are more.
    pub(super) is_cut: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) key: String,
    /// Name of its host, if it is one that a host may have.
    pub(super) host: Option<String>,
}

impl Ranged {
    pub(super) fn into_queue(self) -> Queue {
        Queue {
            revision: self.header.revision,
            members: self.kvs.iter().filter_map(KeyValue::to_member).collect(),
            is_cut: self.more,
        }
    }
}

impl KeyValue {
    /// `None`: the key is none of Firn's.
    fn to_member(&self) -> Option<Member> {
        let text = |bytes: &str| String::from_utf8(BASE64_STANDARD.decode(bytes).ok()?).ok();
        let is_shown = |host: &String| {
            host.len() <= HOST_BYTES_MAX && host.chars().all(|char| char.is_ascii_graphic())
        };
        Some(Member {
            key: text(&self.key)?,
            host: text(&self.value).filter(is_shown),
        })
    }
}
