//! The client of etcd against servers that are not etcd, or that answer wrongly.

#[path = "../../firn-hosts/tests/common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use common::{HANGS_AFTER, Host, limits};
use firn_etcd::{Client, EtcdError, EtcdService};
use firn_hosts::tokens::{LockService, ServiceError, TokenState};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

/// How long a host waits for a token in these tests.
const WAIT: Duration = Duration::from_millis(600);

/// Starts a server that calls `answer` for each connection once a request has come. Its threads run until the test
/// process ends.
fn serve(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    serve_requests(move |_, stream| answer(stream))
}

/// Like [`serve`], but `answer` also receives the request.
fn serve_requests(answer: impl Fn(Vec<u8>, TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                if let Some(request) = await_request(&stream) {
                    answer(request, stream);
                }
            });
        }
    });
    address
}

fn await_request(mut stream: &TcpStream) -> Option<Vec<u8>> {
    stream
        .set_read_timeout(Some(HANGS_AFTER))
        .expect("a timeout");
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    // Each request is one JSON object. A read that ends with a brace therefore ends the request.
    loop {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(count) => request.extend(&buffer[..count]),
        }
        if request.ends_with(b"}") {
            return Some(request);
        }
    }
}

fn serve_bytes(answer: Vec<u8>) -> SocketAddr {
    serve(move |mut stream| {
        let _ = stream.write_all(&answer);
    })
}

fn http(status: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn service(address: SocketAddr) -> EtcdService {
    let client = Client::new(&[format!("http://{address}")], WAIT).expect("a client");
    EtcdService::new(Arc::new(client), "test", 0, "n0", WAIT)
}

/// Returns the error of a request to `address`. Asserts that it comes in time and is fit for a log.
fn refusal(address: SocketAddr) -> EtcdError {
    let began = Instant::now();
    let error = service(address).ask().expect_err("that is no etcd");
    assert!(began.elapsed() < HANGS_AFTER, "{error}");
    let text = error.to_string();
    assert!(
        text.len() < 1000 && !text.contains(char::is_control),
        "{text:?}"
    );
    println!("{text}");
    match error {
        ServiceError::Outside(error) => *error.downcast().expect("an error of etcd"),
        other => panic!("{other}"),
    }
}

#[test]
fn answers_that_are_none_of_etcd_are_told_as_that() {
    let deep = "[".repeat(100_000);
    for body in [
        "",
        "null",
        "[]",
        "{}",
        "{\"ID\":7}",
        "{\"ID\":\"x\",\"TTL\":\"3\"}",
        "<html>",
        &deep,
    ] {
        let error = refusal(serve_bytes(http("200 OK", body)));
        assert!(
            matches!(error, EtcdError::Garbled { .. }),
            "{body:.20}: {error}"
        );
    }
}

#[test]
fn refusals_are_told_in_the_words_of_the_server_and_no_more_than_that() {
    let body = r#"{"error":"old","code":16,"message":"etcdserver: user name is empty"}"#;
    let error = refusal(serve_bytes(http("401 Unauthorized", body)));
    assert!(
        matches!(error, EtcdError::Refused { status: 401, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("user name is empty"), "{error}");
    let ill = "\u{1b}[31m\n".repeat(5000);
    for (status, body) in [
        ("500 Internal Server Error", ""),
        ("503 Busy", ill.as_str()),
        ("404 Not Found", "Not Found"),
    ] {
        let error = refusal(serve_bytes(http(status, body)));
        assert!(matches!(error, EtcdError::Refused { .. }), "{error}");
    }
}

#[test]
fn redirections_are_not_followed() {
    let other = serve(|_| panic!("it was asked"));
    let head =
        format!("HTTP/1.1 307 Elsewhere\r\nLocation: http://{other}/\r\nContent-Length: 0\r\n\r\n");
    let error = refusal(serve_bytes(head.into_bytes()));
    assert!(
        matches!(error, EtcdError::Refused { status: 307, .. }),
        "{error}"
    );
}

#[test]
fn half_and_endless_and_missing_answers_end_in_time() {
    let half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"ID\":".to_vec();
    let half_head = b"HTTP/1.1 200 OK\r\nConte".to_vec();
    for answer in [half, half_head, Vec::new()] {
        let error = refusal(serve_bytes(answer));
        assert!(matches!(error, EtcdError::Unreached { .. }), "{error}");
    }
    let endless = |mut stream: TcpStream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(&[b' '; 4096]).is_ok() {}
    };
    let endless_head = |mut stream: TcpStream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n");
        while stream
            .write_all(b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n")
            .is_ok()
        {}
    };
    // One byte at intervals: each single read is in time, but the whole answer is not.
    let trickle = |mut stream: TcpStream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n");
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let silent = |mut stream: TcpStream| {
        let _ = stream.read(&mut [0]);
    };
    for address in [
        serve(endless),
        serve(endless_head),
        serve(trickle),
        serve(silent),
    ] {
        let error = refusal(address);
        assert!(matches!(error, EtcdError::Unreached { .. }), "{error}");
    }
    let closed = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("address");
    assert!(matches!(refusal(closed), EtcdError::Unreached { .. }));
}

#[test]
fn random_bytes_are_refused() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let valid = http(
        "200 OK",
        r#"{"header":{"revision":"5"},"ID":"12","TTL":"3","result":{}}"#,
    );
    for _ in 0..100 {
        let mut answer = valid.clone();
        for _ in 0..rng.random_range(1..20) {
            let at = rng.random_range(0..answer.len());
            match rng.random_range(0..3) {
                0 => answer[at] = rng.random(),
                1 => answer.truncate(at.max(1)),
                _ => answer.insert(at, rng.random()),
            }
        }
        // The random answer may grant the lease, but it never has a queue.
        let error = service(serve_bytes(answer)).ask().expect_err("no etcd");
        assert!(error.to_string().len() < 1000, "{error}");
    }
}

#[test]
fn a_lane_goes_on_without_a_server_that_is_no_etcd() {
    let address = serve_bytes(http("200 OK", "{}"));
    let host = Host::start(Box::new(service(address)), limits(20, 300));
    assert!(!host.enter().has_token());
    let figures = host.figures();
    assert_eq!(figures.state, TokenState::Without);
    assert!(
        figures
            .last_error
            .is_some_and(|error| error.contains("does not answer as etcd does"))
    );
}

/// Starts a server like etcd. In its queue another host is first in each answer, with a new holder each time, and this
/// host is second.
fn serve_a_queue_without_end() -> SocketAddr {
    let place = Mutex::new((0, None));
    serve_requests(move |request, mut stream| {
        let text = String::from_utf8_lossy(&request).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").expect("a request");
        let body: Value = serde_json::from_str(body).expect("a JSON object");
        let queue = || {
            let mut place = place.lock();
            let (holder, own) = &mut *place;
            let put = body.pointer("/success/0/request_put/key");
            *own = put.or(own.as_ref()).cloned();
            *holder += 1;
            let first = BASE64.encode(format!("firn/test/lane-0/{holder}"));
            let name = BASE64.encode("other");
            json!({
                "header": { "revision": "5" },
                "kvs": [{ "key": first, "value": name }, { "key": own, "value": name }],
                "count": "2",
            })
        };
        let path = head.split(' ').nth(1).expect("a path");
        // A stream of answers: the watch is created, and an event has happened.
        let watched = "{\"result\":{\"created\":true}}\n{\"result\":{\"events\":[]}}\n";
        let answer = match path {
            "/v3/watch" => watched.into(),
            "/v3/lease/grant" => json!({ "ID": "7", "TTL": "3" }).to_string(),
            "/v3/lease/keepalive" => json!({ "result": { "ID": "7", "TTL": "3" } }).to_string(),
            "/v3/kv/txn" => json!({ "responses": [{ "response_range": queue() }] }).to_string(),
            "/v3/kv/range" => queue().to_string(),
            _ => json!({ "header": { "revision": "5" } }).to_string(),
        };
        let _ = stream.write_all(&http("200 OK", &answer));
    })
}

/// Proves S-token-5.
#[test]
fn regression_a_lane_waited_for_ever_in_a_queue_that_has_no_end() {
    let host = Host::start(
        Box::new(service(serve_a_queue_without_end())),
        limits(20, 300),
    );
    assert!(!host.enter().has_token());
    let figures = host.figures();
    assert_eq!(figures.holder.as_deref(), Some("other"), "{figures:?}");
    assert_eq!(figures.state, TokenState::Without);
    for _ in 0..20 {
        assert!(!host.enter().has_token());
    }
    assert_eq!(host.figures().went_without, 1, "it does not wait again");
}

#[test]
fn addresses_that_are_none_are_refused() {
    for (endpoint, why) in [
        ("https://127.0.0.1:2379", "http://"),
        ("127.0.0.1:2379", "http://"),
        ("http://127.0.0.1", "HOST:PORT"),
        ("http://user:word@127.0.0.1:2379", "HOST:PORT"),
        ("http://127.0.0.1:2379/v3", "behind the port"),
        ("http://127.0.0.1:99999", "HOST:PORT"),
        ("http://a b:1", "uri"),
        ("", "not an address"),
    ] {
        let error = Client::new(&[endpoint.to_owned()], WAIT).expect_err(endpoint);
        assert!(error.to_string().contains(why), "{endpoint}: {error}");
    }
    assert!(Client::new(&[], WAIT).is_err());
    assert!(Client::new(&["http://127.0.0.1:2379/".to_owned()], WAIT).is_ok());
}
