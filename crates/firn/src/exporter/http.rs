//! HTTP/1.1 as far as a collector of metrics needs it: one GET request per connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::listener::Client;
use crate::failure::Failure;

/// Maximum size of a request in bytes.
pub const REQUEST_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

/// A response to a client.
struct Response {
    /// Status code and reason, as in the status line.
    status: &'static str,
    /// Value of the header Content-Type.
    content_type: &'static str,
    /// The body.
    body: Arc<str>,
    /// Whether the request was HEAD, so that the response has no body.
    is_head: bool,
}

impl Response {
    /// Returns a response with a text for people.
    fn text(status: &'static str, body: &str) -> Self {
        Self {
            status,
            content_type: TEXT_TYPE,
            body: body.into(),
            is_head: false,
        }
    }

    /// Returns the bytes of the response: status line, header and body.
    fn bytes(&self) -> Vec<u8> {
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             X-Content-Type-Options: nosniff\r\n\r\n",
            self.status,
            self.content_type,
            self.body.len()
        );
        let body = if self.is_head { "" } else { &self.body };
        [head.as_bytes(), body.as_bytes()].concat()
    }
}

/// Reads a client's request and sends the response, as far as this succeeds before the deadline.
pub(super) fn serve(
    client: Client,
    deadline: Instant,
    metrics: &dyn Fn() -> Result<Arc<str>, Failure>,
) {
    let socket = OwnedFd::from(client);
    let response = match read_request(&socket, deadline) {
        Ok(Some(request)) => respond(&request, metrics),
        Ok(None) => Response::text(
            "431 Request Header Fields Too Large",
            "the request is too long\n",
        ),
        // The client has closed its connection, or its time is over.
        Err(_) => return,
    };
    // A client that is gone needs no response.
    let _ = write_all(&socket, &response.bytes(), deadline);
}

/// Tells a client to retry later. The response is sent only if the socket accepts it without waiting.
pub(super) fn refuse(client: Client) {
    let socket = OwnedFd::from(client);
    let response = Response::text("503 Service Unavailable", "too many clients: retry later\n");
    // A client without the response sees that its connection is closed.
    let _ = send(
        &socket,
        &response.bytes(),
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    );
}

/// Returns the bytes of a request up to the end of its header. Returns `None` if they exceed [`REQUEST_BYTES_MAX`].
fn read_request(socket: &OwnedFd, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut request = Vec::new();
    let mut buffer = [0; 2048];
    // An empty line ends the header.
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        if request.len() >= REQUEST_BYTES_MAX {
            return Ok(None);
        }
        wait_until_ready(socket, PollFlags::IN, deadline)?;
        match recv(socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, len)) => request.extend_from_slice(&buffer[..len]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(request))
}

/// Writes all bytes to a socket, or fails at the deadline.
fn write_all(socket: &OwnedFd, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        wait_until_ready(socket, PollFlags::OUT, deadline)?;
        match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent_len) => bytes = &bytes[sent_len..],
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until a socket is ready, or a signal arrives. Fails at the deadline.
fn wait_until_ready(socket: &OwnedFd, event: PollFlags, deadline: Instant) -> io::Result<()> {
    let remaining_time = deadline.saturating_duration_since(Instant::now());
    if remaining_time.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let timeout = Timespec::try_from(remaining_time).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, event)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the response with the metrics, or with the reason why they are not available.
fn metrics_response(metrics: Result<Arc<str>, Failure>) -> Response {
    match metrics {
        Ok(body) => Response {
            status: "200 OK",
            content_type: METRICS_TYPE,
            body,
            is_head: false,
        },
        Err(failure) => {
            let reason = failure.text().unwrap_or_default();
            Response::text("500 Internal Server Error", &format!("{reason}\n"))
        }
    }
}

/// Returns the response to a request. Only GET and HEAD of the metrics ask the mounts.
fn respond(request: &[u8], metrics: &dyn Fn() -> Result<Arc<str>, Failure>) -> Response {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    if !matches!(parsed.parse(request), Ok(httparse::Status::Complete(_))) {
        return Response::text("400 Bad Request", "this is not an HTTP request\n");
    }
    let is_head = parsed.method == Some("HEAD");
    if !is_head && parsed.method != Some("GET") {
        return Response::text("405 Method Not Allowed", "only GET and HEAD are answered\n");
    }
    let target = parsed.path.unwrap_or_default();
    let path_without_query = target.split('?').next().unwrap_or_default();
    let response = match path_without_query {
        "/metrics" => metrics_response(metrics()),
        "/" => Response::text("200 OK", "firn exporter: the metrics are at /metrics\n"),
        _ => Response::text("404 Not Found", "the metrics are at /metrics\n"),
    };
    Response {
        is_head,
        ..response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_line(request: &str) -> String {
        let response = respond(request.as_bytes(), &|| Ok("firn_up 1\n".into()));
        let text = String::from_utf8(response.bytes()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        format!("{} {body:?}", head.lines().next().unwrap())
    }

    #[test]
    fn only_reads_of_the_metrics_are_answered_with_them() {
        for (request, expected) in [
            (
                "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
                "HTTP/1.1 200 OK \"firn_up 1\\n\"",
            ),
            (
                "GET /metrics?a=b HTTP/1.0\r\n\r\n",
                "HTTP/1.1 200 OK \"firn_up 1\\n\"",
            ),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK \"\""),
        ] {
            assert_eq!(first_line(request), expected);
        }
        for (request, status) in [
            ("GET /x HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("nonsense\r\n\r\n", "400"),
            ("GET /metrics\r\n\r\n", "400"),
        ] {
            assert!(first_line(request).contains(status), "{request}");
        }
    }

    #[test]
    fn a_request_is_read_in_pieces_and_one_that_is_too_long_is_not() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        let writer = std::thread::spawn(move || {
            write_all(&theirs, b"GET / HTTP/1.1\r\n", deadline).unwrap();
            write_all(&theirs, b"\r\n", deadline).unwrap();
            theirs
        });
        let request = read_request(&ours, deadline).unwrap().unwrap();
        assert_eq!(request, b"GET / HTTP/1.1\r\n\r\n");
        let theirs = writer.join().unwrap();
        let long = std::thread::spawn(move || {
            let _ = write_all(&theirs, &vec![b'x'; REQUEST_BYTES_MAX], deadline);
            theirs
        });
        assert_eq!(read_request(&ours, deadline).unwrap(), None);
        drop(long.join());
        // The exporter stops waiting for a silent client at the deadline.
        let (silent, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = read_request(&silent.into(), Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
