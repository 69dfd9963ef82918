//! Calls of etcd's JSON gateway over HTTP.
//!
//! Promises
//! * Each request to one endpoint ends within its timeout. The next call begins with the endpoint that answered last.
//! * At most [`ANSWER_BYTES_MAX`] bytes of an answer are read.
//! * No proxy of the environment is used, and no redirection is followed.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firn_hosts::tokens::ServiceError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::{Response, StatusCode, Uri};
use ureq::{Agent, Body};

use crate::messages::{Ranged, Text};

/// Maximum size in bytes of an answer. The keys of a queue of 1000 hosts take about 200 KiB.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Maximum length in characters of an error text that another program sent and Firn logs.
const MESSAGE_CHARS_MAX: usize = 200;
/// Maximum time to wait for one endpoint before the next one is tried.
const TIMEOUT_MAX: Duration = Duration::from_secs(2);
/// Number of requests for which there is time while a host waits for a token.
const REQUESTS_PER_WAIT: u32 = 3;

/// Why a call of etcd failed.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The text is not the address of an etcd endpoint.
    #[error("{endpoint} is not an address of etcd: {why}")]
    Endpoint {
        /// The text that was given as an address.
        endpoint: String,
        /// What is wrong with the text.
        why: String,
    },
    /// No answer came from the server, or the connection failed.
    #[error("etcd at {endpoint} does not answer: {source}")]
    Unreached {
        /// The address of the server.
        endpoint: String,
        /// The error of the HTTP client.
        source: Box<ureq::Error>,
    },
    /// The server refused the request.
    #[error("etcd at {endpoint} refused: {message} (HTTP {status})")]
    Refused {
        /// The address of the server.
        endpoint: String,
        /// HTTP status.
        status: u16,
        /// The error text of the server.
        message: String,
    },
    /// The answer does not have the form that etcd's answers have.
    #[error("{endpoint} does not answer as etcd does: {why}")]
    Garbled {
        /// The address of the server.
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
    /// Returns whether the same request may succeed at another endpoint.
    fn may_succeed_elsewhere(&self) -> bool {
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
    /// The addresses, each as `http://host:port`; at least one.
    endpoints: Vec<String>,
    /// Index of the endpoint that answered last.
    preferred: AtomicUsize,
    /// Maximum time to wait for one endpoint.
    timeout: Duration,
}

impl Client {
    /// Creates a client for these endpoints, each `http://host:port`. Nothing is sent yet.
    ///
    /// Fails if there is no endpoint, or if one is not such an address.
    ///
    /// `token_wait` is how long a host waits for a token, the lock that lets one host at a time write to a server. Each
    /// request may take a third of that time, at most 2 s.
    pub fn new(endpoints: &[String], token_wait: Duration) -> Result<Self, EtcdError> {
        let mut checked_endpoints = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints {
            checked_endpoints.push(normalize_endpoint(endpoint)?);
        }
        if checked_endpoints.is_empty() {
            // There is no address to name, so the message reads "nothing is not an address of etcd".
            return Err(EtcdError::Endpoint {
                endpoint: "nothing".into(),
                why: "at least one endpoint is required".into(),
            });
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .build();
        Ok(Self {
            agent: config.into(),
            endpoints: checked_endpoints,
            preferred: AtomicUsize::new(0),
            timeout: (token_wait / REQUESTS_PER_WAIT).min(TIMEOUT_MAX),
        })
    }

    /// Checks that at least one endpoint answers as etcd does.
    pub fn check(&self) -> Result<(), EtcdError> {
        // Any request whose answer has a known form would do.
        let request = serde_json::json!({ "key": Text("firn/"), "keys_only": true, "limit": "1" });
        let _answer: Ranged = self.call("kv/range", &request)?;
        Ok(())
    }

    /// Calls `method` of etcd, and returns the decoded answer. Sends `request` to one endpoint after the other until
    /// one answers, beginning with the endpoint that answered last.
    ///
    /// Fails at once with an error that every other endpoint would repeat, and otherwise with the last endpoint's
    /// error.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        request: &impl Serialize,
    ) -> Result<T, EtcdError> {
        let body = serde_json::to_vec(request).expect("plain data");
        let endpoint_count = self.endpoints.len();
        let first_index = self.preferred.load(Ordering::Relaxed);
        let mut result = self.call_endpoint(first_index, method, &body);
        for offset in 1..endpoint_count {
            let should_try_next = matches!(&result, Err(error) if error.may_succeed_elsewhere());
            if !should_try_next {
                break;
            }
            let index = (first_index + offset) % endpoint_count;
            result = self.call_endpoint(index, method, &body);
            if result.is_ok() {
                self.preferred.store(index, Ordering::Relaxed);
            }
        }
        result
    }

    /// Sends the JSON `body` to the endpoint with this index, and decodes the answer. Fails if the server cannot be
    /// reached, refuses the request (a status other than 200), or sends more than the maximum.
    fn call_endpoint<T: DeserializeOwned>(
        &self,
        index: usize,
        method: &str,
        body: &[u8],
    ) -> Result<T, EtcdError> {
        let endpoint = &self.endpoints[index];
        let mut response = self
            .post(endpoint, method, body, self.timeout)
            .map_err(|error| unreached_error(endpoint, error))?;
        let status = response.status();
        let answer = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_vec()
            .map_err(|error| unreached_error(endpoint, error))?;
        if status != StatusCode::OK {
            return Err(refused_error(endpoint, status, &answer));
        }
        serde_json::from_slice(&answer)
            .map_err(|error| invalid_answer_error(endpoint, &error.to_string()))
    }

    fn post(
        &self,
        endpoint: &str,
        method: &str,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Response<Body>, ureq::Error> {
        self.agent
            .post(format!("{endpoint}/v3/{method}"))
            .header("content-type", "application/json")
            .config()
            .timeout_global(Some(timeout))
            .build()
            .send(body)
    }

    /// Waits until a watched key of etcd may have changed, for at most `timeout`. Returns `Ok` also after the timeout.
    ///
    /// `request` names the key. Each line of the answer after the first counts as a change, whatever its content,
    /// because the caller reads the key again in any case.
    pub(super) fn watch(
        &self,
        request: &impl Serialize,
        timeout: Duration,
    ) -> Result<(), EtcdError> {
        let endpoint = self.preferred_endpoint();
        let body = serde_json::to_vec(request).expect("plain data");
        let mut response = match self.post(endpoint, "watch", &body, timeout) {
            Ok(response) => response,
            // Some versions of etcd send nothing, not even a header, before the first event.
            Err(ureq::Error::Timeout(_)) => return Ok(()),
            Err(error) => return Err(unreached_error(endpoint, error)),
        };
        let status = response.status();
        let mut lines = BufReader::new(response.body_mut().as_reader()).take(ANSWER_BYTES_MAX);
        if status != StatusCode::OK {
            let mut answer = Vec::new();
            // The error says what was read, even if it is only a part of the answer.
            let _ = lines.read_to_end(&mut answer);
            return Err(refused_error(endpoint, status, &answer));
        }
        // The first line confirms that the watch was created; the second line is the event.
        for _line in 0..2 {
            match lines.read_until(b'\n', &mut Vec::new()) {
                Ok(0) => {
                    let why = "the watch ended without an event";
                    return Err(invalid_answer_error(endpoint, why));
                }
                Ok(_) => {}
                Err(error) if is_timeout(&error) => return Ok(()),
                Err(error) => return Err(unreached_error(endpoint, error.into())),
            }
        }
        Ok(())
    }

    fn preferred_endpoint(&self) -> &str {
        &self.endpoints[self.preferred.load(Ordering::Relaxed)]
    }

    /// Returns the error for an answer of the preferred endpoint that does not have the expected form.
    pub(super) fn invalid_answer_error(&self, why: &str) -> EtcdError {
        invalid_answer_error(self.preferred_endpoint(), why)
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    error.kind() == ErrorKind::TimedOut || matches!(inner, Some(ureq::Error::Timeout(_)))
}

/// Returns the address of an endpoint as `http://HOST:PORT`, without a slash at its end. Fails if the address has
/// another form: a user name, a path and a query are errors.
fn normalize_endpoint(endpoint: &str) -> Result<String, EtcdError> {
    let address_error = |why: &str| EtcdError::Endpoint {
        endpoint: endpoint.to_owned(),
        why: why.to_owned(),
    };
    let uri = match endpoint.parse::<Uri>() {
        Ok(uri) => uri,
        Err(error) => return Err(address_error(&error.to_string())),
    };
    if uri.scheme_str() != Some("http") {
        return Err(address_error(
            "it does not begin with http://, the only supported scheme",
        ));
    }
    // The authority is the part `HOST:PORT`; a user name would come before an `@` in it.
    let has_authority_without_user = uri
        .authority()
        .is_some_and(|authority| !authority.as_str().contains('@'));
    let has_host = uri.host().is_some_and(|host| !host.is_empty());
    if !has_authority_without_user || !has_host || uri.port_u16().is_none() {
        return Err(address_error("http://HOST:PORT is expected"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(address_error("nothing is allowed behind the port"));
    }
    Ok(endpoint.trim_end_matches('/').to_owned())
}

fn unreached_error(endpoint: &str, error: ureq::Error) -> EtcdError {
    EtcdError::Unreached {
        endpoint: endpoint.to_owned(),
        source: Box::new(error),
    }
}

fn invalid_answer_error(endpoint: &str, why: &str) -> EtcdError {
    EtcdError::Garbled {
        endpoint: endpoint.to_owned(),
        why: printable(why),
    }
}

/// Returns the error for an answer with another status than 200. Its text is the message in the answer, or the whole
/// answer.
fn refused_error(endpoint: &str, status: StatusCode, answer: &[u8]) -> EtcdError {
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
        status: status.as_u16(),
        message: printable(&message),
    }
}

/// Replaces control characters and cuts the text, so that it is fit for a log.
fn printable(text: &str) -> String {
    let shown = text
        .chars()
        .map(|char| if char.is_control() { ' ' } else { char });
    shown.take(MESSAGE_CHARS_MAX).collect()
}
