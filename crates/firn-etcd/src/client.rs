//! Calls of etcd's JSON gateway over HTTP.
//!
//! Promises
//! * Each call ends within the patience for each endpoint; an endpoint that answers is asked first the next time.
//! * At most [`ANSWER_BYTES_MAX`] of an answer are read.
//! * No proxy of the environment is used, and no redirection is followed.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firn_hosts::tokens::ServiceError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Agent;
use ureq::http::Uri;

use crate::messages::{Ranged, Text};

/// A queue of 1000 hosts has some 200 KiB.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Of the text of an error that is told.
const MESSAGE_CHARS_MAX: usize = 200;
/// What an endpoint that does not answer costs at most, before the next one is asked.
const PATIENCE_MAX: Duration = Duration::from_secs(2);

/// Why etcd did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// This is no endpoint of etcd.
    #[error("{endpoint} is no address of etcd: {why}")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// What is wrong with it.
        why: String,
    },
    /// It does not answer.
    #[error("etcd at {endpoint} does not answer: {source}")]
    Unreached {
        /// The server.
        endpoint: String,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// It refused.
    #[error("etcd at {endpoint} refused: {message} (HTTP {status})")]
    Refused {
        /// The server.
        endpoint: String,
        /// HTTP status.
        status: u16,
        /// In its words.
        message: String,
    },
    /// What it said is no answer to what it was asked.
    #[error("{endpoint} does not answer as etcd does: {why}")]
    Garbled {
        /// The server.
        endpoint: String,
        /// What is wrong with the answer.
        why: String,
    },
}

impl From<EtcdError> for ServiceError {
    fn from(error: EtcdError) -> Self {
        Self::Outside(Box::new(error))
    }
}

impl EtcdError {
    /// Whether another member of the cluster may do better.
    fn is_of_endpoint(&self) -> bool {
        match self {
            Self::Unreached { .. } | Self::Garbled { .. } => true,
            Self::Refused { status, .. } => *status >= 500,
            Self::Endpoint { .. } => false,
        }
    }
}

/// The members of an etcd cluster.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    /// `http://host:port`, each; at least one.
    endpoints: Vec<String>,
    /// The one that answered last.
    preferred: AtomicUsize,
    patience: Duration,
}

impl Client {
    /// Speaks to these endpoints, `http://host:port` each. `wait`: how long a host waits for a token.
    pub fn new(endpoints: &[String], wait: Duration) -> Result<Self, EtcdError> {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|endpoint| checked(endpoint))
            .collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err(EtcdError::Endpoint {
                endpoint: "nothing".into(),
                why: "give at least one endpoint".into(),
            });
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .build();
        Ok(Self {
            agent: config.into(),
            endpoints,
            preferred: AtomicUsize::new(0),
            patience: (wait / 3).min(PATIENCE_MAX),
        })
    }

    /// Whether one of the endpoints answers as etcd does.
    pub fn check(&self) -> Result<(), EtcdError> {
        let nothing = serde_json::json!({ "key": Text("firn/"), "keys_only": true, "limit": "1" });
        self.call::<Ranged>("kv/range", &nothing).map(drop)
    }

    /// Asks one endpoint after the other for the answer to `request`.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        request: &impl Serialize,
    ) -> Result<T, EtcdError> {
        let body = serde_json::to_vec(request).expect("plain data");
        let first = self.preferred.load(Ordering::Relaxed);
        let mut result = self.call_at(first, method, &body);
        for offset in 1..self.endpoints.len() {
            match &result {
                Err(error) if error.is_of_endpoint() => {}
                _ => break,
            }
            let index = (first + offset) % self.endpoints.len();
            result = self.call_at(index, method, &body);
            if result.is_ok() {
                self.preferred.store(index, Ordering::Relaxed);
            }
        }
        result
    }

    fn call_at<T: DeserializeOwned>(
        &self,
        index: usize,
        method: &str,
        body: &[u8],
    ) -> Result<T, EtcdError> {
        let endpoint = &self.endpoints[index];
        let unreached = |error| unreached(endpoint, error);
        let mut response = self
            .agent
            .post(format!("{endpoint}/v3/{method}"))
            .header("content-type", "application/json")
            .config()
            .timeout_global(Some(self.patience))
            .build()
            .send(body)
            .map_err(unreached)?;
        let status = response.status().as_u16();
        let answer = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_vec()
            .map_err(unreached)?;
        if status != 200 {
            return Err(refused(endpoint, status, &answer));
        }
        serde_json::from_slice(&answer).map_err(|error| garbled(endpoint, &error.to_string()))
    }

    /// Waits until a watched key may have changed, for at most `patience`. Any line of the answer after the first counts
    /// as a change, whatever it says: the caller reads the key again in each case.
    pub(super) fn watch(
        &self,
        request: &impl Serialize,
        patience: Duration,
    ) -> Result<(), EtcdError> {
        let endpoint = &self.endpoints[self.preferred.load(Ordering::Relaxed)];
        let body = serde_json::to_vec(request).expect("plain data");
        let sent = self
            .agent
            .post(format!("{endpoint}/v3/watch"))
            .header("content-type", "application/json")
            .config()
            .timeout_global(Some(patience))
            .build()
            .send(&body[..]);
        let mut response = match sent {
            // Some versions of etcd send nothing, not even a header, before the first event.
            Err(ureq::Error::Timeout(_)) => return Ok(()),
            sent => sent.map_err(|error| unreached(endpoint, error))?,
        };
        let status = response.status().as_u16();
        let mut lines = BufReader::new(response.body_mut().as_reader()).take(ANSWER_BYTES_MAX);
        if status != 200 {
            let mut answer = Vec::new();
            let _ = lines.read_to_end(&mut answer);
            return Err(refused(endpoint, status, &answer));
        }
        // The first line says that the watch was made, the second one is the event.
        for _line in 0..2 {
            match lines.read_until(b'\n', &mut Vec::new()) {
                Ok(0) => return Err(garbled(endpoint, "a watch ended")),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => return Ok(()),
                Err(error) => return Err(unreached(endpoint, error.into())),
            }
        }
        Ok(())
    }

    /// What the endpoint that answered last said makes no sense.
    pub(super) fn garbled(&self, why: &str) -> EtcdError {
        garbled(&self.endpoints[self.preferred.load(Ordering::Relaxed)], why)
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    error.kind() == ErrorKind::TimedOut || matches!(inner, Some(ureq::Error::Timeout(_)))
}

/// An endpoint without the slash at its end.
fn checked(endpoint: &str) -> Result<String, EtcdError> {
    let refused = |why: &str| EtcdError::Endpoint {
        endpoint: endpoint.to_owned(),
        why: why.to_owned(),
    };
    let uri: Uri = endpoint
        .parse()
        .map_err(|error: ureq::http::uri::InvalidUri| refused(&error.to_string()))?;
    if uri.scheme_str() != Some("http") {
        return Err(refused(
            "it does not begin with http://, and nothing else is spoken",
        ));
    }
    let has_user = uri
        .authority()
        .is_none_or(|authority| authority.as_str().contains('@'));
    if has_user || uri.host().is_none_or(str::is_empty) || uri.port_u16().is_none() {
        return Err(refused("http://HOST:PORT is expected"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(refused("there is something behind the port"));
    }
    Ok(endpoint.trim_end_matches('/').to_owned())
}

fn unreached(endpoint: &str, error: ureq::Error) -> EtcdError {
    EtcdError::Unreached {
        endpoint: endpoint.to_owned(),
        source: Box::new(error),
    }
}

fn garbled(endpoint: &str, why: &str) -> EtcdError {
    EtcdError::Garbled {
        endpoint: endpoint.to_owned(),
        why: printable(why),
    }
}

fn refused(endpoint: &str, status: u16, answer: &[u8]) -> EtcdError {
    #[derive(serde::Deserialize)]
    struct Refusal {
        message: String,
    }
    let message = match serde_json::from_slice(answer) {
        Ok(Refusal { message }) => message,
        Err(_) => String::from_utf8_lossy(answer).into_owned(),
    };
    EtcdError::Refused {
        endpoint: endpoint.to_owned(),
        status,
        message: printable(&message),
    }
}

/// Text from another program, for a log.
fn printable(text: &str) -> String {
    let shown = text
        .chars()
        .map(|char| if char.is_control() { ' ' } else { char });
    shown.take(MESSAGE_CHARS_MAX).collect()
}
