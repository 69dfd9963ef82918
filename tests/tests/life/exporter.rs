//! `firn exporter`, and the examples for Prometheus and Grafana.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_tests::command::{exit_code, wait_child, wait_until};
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::{FirnMount, Sandbox, run};
use regex::Regex;

const LIMIT: Duration = Duration::from_secs(60);

/// An exporter that ends with the test.
struct Exporter {
    child: Child,
    /// What it says first.
    said: String,
}

impl Exporter {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("start");
        let stderr = child.stderr.take().expect("a pipe");
        let mut said = String::new();
        BufReader::new(stderr).read_line(&mut said).expect("a line");
        assert!(said.contains("metrics are at"), "{said}");
        Self { child, said }
    }

    fn on(sandbox: &Sandbox, address: &str) -> Self {
        Self::start(&mut sandbox.firn(["exporter", "--listen", address]))
    }

    /// Address and port, without the path.
    fn address(&self) -> String {
        let (_, rest) = self.said.trim().split_once("http://").expect("an address");
        rest.trim_end_matches("/metrics").to_owned()
    }

    fn scrape(&self) -> String {
        get(
            TcpStream::connect(self.address()).expect("connect"),
            "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        )
    }

    fn end(mut self) {
        kill(self.child.id(), libc::SIGTERM);
        let status = wait_child(&mut self.child, LIMIT).expect("an end");
        assert_eq!(exit_code(status), 0);
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(mut client: impl Read + Write, request: &str) -> String {
    client.write_all(request.as_bytes()).expect("send");
    let mut text = String::new();
    // A refused client may see the reset of what it sent too much.
    let _ = client.read_to_string(&mut text);
    text
}

/// The samples of a metric of one mount: for root there are those of other tests, too.
fn samples<'a>(text: &'a str, mount_point: &Path, name: &str) -> Vec<&'a str> {
    let start = format!("{name}{{");
    let label = format!("mount_point=\"{}\"", mount_point.display());
    text.lines()
        .filter(|line| line.starts_with(&start) && line.contains(&label))
        .collect()
}

fn is_up(text: &str, mount_point: &Path, value: u32) -> bool {
    let up = samples(text, mount_point, "firn_up");
    up.len() == 1 && up[0].ends_with(&format!(" {value}"))
}

/// Proves S-seen-9.
#[test]
fn a_scrape_has_the_figures_of_each_mount_and_a_hanging_firnd_is_down() {
    let sandbox = Sandbox::new("exporter");
    let mount = FirnMount::new(&sandbox, "arena-size=64M");
    fs::write(mount.join("a"), vec![7; 100_000]).expect("write");
    let exporter = Exporter::on(&sandbox, "127.0.0.1:0");
    let text = exporter.scrape();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(is_up(&text, mount.path(), 1), "{text}");
    let host = rustix::system::uname();
    let labels = format!(
        "backing=\"{}\",mount_point=\"{}\",host=\"{}\"",
        mount.backing().display(),
        mount.path().display(),
        host.nodename().to_string_lossy()
    );
    let bytes = format!("firn_ingest_bytes_total{{{labels}}} 100000");
    assert!(text.lines().any(|line| line == bytes), "{bytes}: {text}");
    for name in ["write", "close", "fsync", "drain"] {
        let count = samples(&text, mount.path(), &format!("firn_{name}_seconds_count"));
        assert_eq!(count.len(), 1, "{text}");
        assert_eq!(count[0].ends_with(" 0"), name == "fsync", "{}", count[0]);
    }
    let buckets = samples(&text, mount.path(), "firn_ingest_write_bytes_bucket");
    assert!(
        buckets.iter().any(|line| line.contains("le=\"+Inf\"")),
        "{buckets:?}"
    );

    kill(mount.pid(), libc::SIGSTOP);
    wait_until("firnd is down", LIMIT, || {
        is_up(&exporter.scrape(), mount.path(), 0)
    });
    // A connection that hangs is one, however often is asked.
    (0..3).for_each(|_| drop(exporter.scrape()));
    let text = exporter.scrape();
    assert!(
        samples(&text, mount.path(), "firn_ingest_bytes_total").is_empty(),
        "{text}"
    );
    kill(mount.pid(), libc::SIGCONT);
    wait_until("firnd is up", LIMIT, || {
        is_up(&exporter.scrape(), mount.path(), 1)
    });
    let point = mount.path().to_owned();
    mount.umount();
    wait_until("no mount", LIMIT, || {
        samples(&exporter.scrape(), &point, "firn_up").is_empty()
    });
    exporter.end();
}

/// Proves S-seen-9.
#[test]
fn slow_and_malicious_clients_hold_no_other_up() {
    let sandbox = Sandbox::new("exporter-clients");
    let exporter = Exporter::on(&sandbox, "[::1]:0");
    let connect = || TcpStream::connect(exporter.address()).expect("connect");
    // They say nothing, or half of something; some places are left.
    let silent: Vec<TcpStream> = (0..12)
        .map(|at| {
            let mut client = connect();
            client.write_all(&b"GET /met"[..at % 8]).expect("send");
            client
        })
        .collect();
    let text = exporter.scrape();
    assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
    for (request, status) in [
        ("GET /other HTTP/1.1\r\n\r\n".to_owned(), "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n".to_owned(), "405"),
        ("\u{1b}[2J\r\n\r\n".to_owned(), "400"),
        (
            format!("GET /metrics HTTP/1.1\r\nx: {}", "y".repeat(16_000)),
            "431",
        ),
    ] {
        let mut text = String::new();
        // The place of the client before may not be free yet.
        wait_until("a place", LIMIT, || {
            text = get(connect(), &request);
            !text.contains("503")
        });
        assert!(text.is_empty() || text.contains(status), "{status}: {text}");
    }
    // All places are taken: a client that comes then is refused, or cut off, and no client waits.
    let more: Vec<TcpStream> = (0..12).map(|_| connect()).collect();
    let text = get(connect(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(text.is_empty() || text.contains("503"), "{text}");
    drop((silent, more));
    wait_until("a place", LIMIT, || {
        exporter.scrape().starts_with("HTTP/1.1 200")
    });
    exporter.end();
}

#[test]
fn it_serves_a_unix_socket_and_one_that_systemd_hands_over() {
    let sandbox = Sandbox::new("exporter-sockets");
    let socket = sandbox.join("metrics.sock");
    let exporter = Exporter::on(&sandbox, &format!("unix:{}", socket.display()));
    let request = "GET /metrics HTTP/1.0\r\n\r\n";
    let text = get(UnixStream::connect(&socket).expect("connect"), request);
    assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
    exporter.end();
    assert!(!socket.exists());

    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("an address");
    let script = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" exporter 3<&0 </dev/null";
    let mut command = Command::new("sh");
    sandbox.environment(&mut command);
    command.args(["-c", script]).arg(firn_binary());
    command.stdin(Stdio::from(OwnedFd::from(listener)));
    let exporter = Exporter::start(&mut command);
    assert_eq!(exporter.address(), address.to_string());
    assert!(exporter.scrape().starts_with("HTTP/1.1 200 OK"));
    exporter.end();
}

#[test]
fn a_text_file_is_replaced_whole_and_readable_for_others() {
    let sandbox = Sandbox::new("exporter-file");
    let mount = FirnMount::new(&sandbox, "arena-size=64M");
    let file = sandbox.join("firn.prom");
    let mut command = sandbox.firn(["exporter", "--textfile"]);
    let mut child = command.arg(&file).spawn().expect("start");
    wait_until("the file", LIMIT, || file.exists());
    kill(child.id(), libc::SIGTERM);
    let status = wait_child(&mut child, LIMIT).expect("an end");
    assert_eq!(exit_code(status), 0);
    let text = fs::read_to_string(&file).expect("read");
    assert!(is_up(&text, mount.path(), 1), "{text}");
    let mode = fs::metadata(&file).expect("stat").permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    let others = fs::read_dir(sandbox.path()).expect("list");
    let left = others.filter(|one| {
        let name = one.as_ref().expect("an entry").file_name();
        name.to_string_lossy().contains("metrics")
    });
    assert_eq!(left.count(), 0);
    mount.umount();
}

fn example(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/monitoring");
    dir.join(name)
}

/// Metrics of docs/METRICS.md, which is made from the table; of a histogram the names of its samples.
fn known_metrics() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/METRICS.md");
    let page = fs::read_to_string(page).expect("the page");
    let row = Regex::new(r"(?m)^\| `(firn_[a-z_]+)` \| ([^|]*) \|").expect("a pattern");
    let mut known = Vec::new();
    for row in row.captures_iter(&page) {
        let name = &row[1];
        if row[2].contains("histogram") {
            known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
        } else {
            known.push(name.to_owned());
        }
    }
    known
}

#[test]
fn each_metric_of_dashboard_and_alerts_is_in_the_table() {
    let known = known_metrics();
    assert!(known.len() > 90, "{known:?}");
    let metric = Regex::new(r"(?-u:\b)firn_[a-z_]+").expect("a pattern");
    for name in ["dashboard.json", "alerts.yml", "alerts-test.yml"] {
        let text = fs::read_to_string(example(name)).expect(name);
        let mut count = 0;
        for found in metric.find_iter(&text) {
            assert!(
                known.iter().any(|known| known == found.as_str()),
                "{name}: {}",
                found.as_str()
            );
            count += 1;
        }
        assert!(count > 5, "{name} names {count} metrics");
    }
    let dashboard = fs::read_to_string(example("dashboard.json")).expect("the dashboard");
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    assert!(
        panels
            .iter()
            .all(|panel| panel["fieldConfig"]["defaults"]["unit"].is_string())
    );
}

#[test]
fn promtool_accepts_the_rules_and_they_fire_when_they_are_to() {
    let promtool = |args: &[&str]| {
        let mut command = Command::new("promtool");
        command.args(args).current_dir(example(""));
        let missing = "promtool is in the package prometheus, which scripts/setup installs";
        assert!(command.arg("--help").output().is_ok(), "{missing}");
        let mut command = Command::new("promtool");
        run(command.args(args).current_dir(example(""))).ok();
    };
    promtool(&["check", "rules", "alerts.yml"]);
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&["test", "rules", "alerts-test.yml"]);
}
