//! What the program exports, and that the rules and the dashboard in packaging/ name nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hotspare_torture::Lab;
use hotspare_torture::lab::Host;
use hotspare_torture::protected::{Engine, HANG, STREAM_PORT, wait_for_listener};

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
const PORT: u16 = 9707;

/// The answer to a request on a host.
fn ask(host: &Host, address: SocketAddr, request: &str) -> String {
    let request = format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n");
    host.inside(move || {
        let mut answer = String::new();
        let mut stream = TcpStream::connect_timeout(&address, HANG).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        // One that is refused may be closed at any time.
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.read_to_string(&mut answer);
        answer
    })
}

fn page(host: &Host) -> String {
    let answer = ask(host, ([127, 0, 0, 1], PORT).into(), "GET /metrics");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    body.to_owned()
}

/// Values by name and labels.
fn values(page: &str) -> BTreeMap<String, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let value = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    lines.map(value).collect()
}

/// Names that a query may use: of histograms, those of their series.
fn names(page: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        match kind {
            "histogram" => {
                names.extend(["bucket", "sum", "count"].map(|end| format!("{name}_{end}")));
            }
            _ => drop(names.insert(name.to_owned())),
        }
    }
    names
}

fn named_in(text: &str) -> BTreeSet<String> {
    let word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter| !word(letter));
    words.filter(|word| word.starts_with("hotspare_")).map(str::to_owned).collect()
}

fn packaging(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(path)
}

/// `promtool`, where there is one, finds nothing wrong.
fn promtool(words: &[&str], input: &str) {
    let started = Command::new("promtool")
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut tool) = started else { return eprintln!("no promtool here: {words:?} not asked") };
    tool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = tool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.trim() != "error", "{words:?}: {said}");
}

#[test]
fn both_hosts_export_what_happens_and_rules_and_dashboard_name_only_that() {
    let lab = Lab::new(2).unwrap();
    let engine = Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(20),
        service_cidr: None,
        replicated: vec!["/srv/hotspare-lab".into()],
        more: ["--metrics", "9707", "--silence", "500ms", "--guest", "a \"guest\""]
            .map(str::to_owned)
            .to_vec(),
    };
    // Open to all interfaces, and still not to strangers.
    let spare = engine
        .spare_with(lab.host(1), &["--metrics", "0.0.0.0:9707", "--silence", "500ms"])
        .unwrap();
    let guest = "while :; do echo x >> /srv/hotspare-lab/file; sleep 0.01; done";
    let guest = ["sh", "-c", guest].map(str::to_owned);
    let primary = engine.run(lab.host(0), &[lab.host(1)], &guest).unwrap();
    Engine::protected(&primary).unwrap();
    let deadline = Instant::now() + HANG;
    let (seen, page_of_primary) = loop {
        let text = page(lab.host(0));
        let seen = values(&text);
        if seen["hotspare_epochs_total"] > 5.0 && seen["hotspare_file_bytes_total"] > 0.0 {
            break (seen, text);
        }
        assert!(Instant::now() < deadline, "{seen:#?}\n{}", primary.said());
    };
    assert_eq!(seen["hotspare_primary"], 1.0);
    assert_eq!(seen["hotspare_protected"], 1.0);
    assert_eq!(seen["hotspare_spares_ready"], 1.0);
    assert_eq!(seen["hotspare_term"], 1.0);
    assert_eq!(seen["hotspare_pause_seconds_count"], seen["hotspare_epochs_total"]);
    assert!(seen["hotspare_pause_seconds_sum"] > 0.0);
    assert!(seen["hotspare_pages_total"] > 0.0);
    assert!(seen["hotspare_sent_bytes_total"] > 0.0);
    assert!(seen["hotspare_heartbeats_total"] > 0.0);
    assert!(seen["hotspare_checkpoint_age_seconds"] < HANG.as_secs_f64());
    let info = r#"hotspare_guest_info{guest="a \"guest\"",guarantee="timeline"}"#;
    assert_eq!(seen[info], 1.0);

    let page_of_spare = page(lab.host(1));
    let of_spare = values(&page_of_spare);
    assert_eq!((of_spare["hotspare_primary"], of_spare["hotspare_ghost_ready"]), (0.0, 1.0));
    assert!(of_spare["hotspare_applied_epochs_total"] > 0.0);
    assert_eq!(of_spare["hotspare_apply_seconds_count"], of_spare["hotspare_applied_epochs_total"]);
    assert!(of_spare["hotspare_file_bytes_total"] > 0.0);

    let exported = names(&page_of_primary);
    assert_eq!(exported, names(&page_of_spare));
    for file in ["prometheus/alerts.yml", "grafana/hotspare.json"] {
        let named = named_in(&std::fs::read_to_string(packaging(file)).unwrap());
        assert!(named.len() > 10, "{file}: {named:?}");
        let strange: Vec<_> = named.difference(&exported).collect();
        assert!(strange.is_empty(), "{file} names what is not exported: {strange:?}");
    }
    promtool(&["check", "metrics"], &page_of_primary);
    let rules = packaging("prometheus/alerts.yml");
    promtool(&["check", "rules", rules.to_str().unwrap()], "");

    let local = SocketAddr::from(([127, 0, 0, 1], PORT));
    assert!(ask(lab.host(0), local, "GET /").starts_with("HTTP/1.1 404 "));
    assert!(ask(lab.host(0), local, "POST /metrics").starts_with("HTTP/1.1 405 "));

    lab.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    let after = values(&page(lab.host(1)));
    assert_eq!((after["hotspare_primary"], after["hotspare_failovers_total"]), (1.0, 1.0));
    assert_eq!((after["hotspare_term"], after["hotspare_protected"]), (2.0, 0.0));
}

#[test]
fn a_stranger_on_the_network_is_told_nothing() {
    let lab = Lab::new(2).unwrap();
    let keys = "/srv/hotspare-lab/keys";
    lab.host(0).run(Command::new(BINARY).args(["keys", keys, "alpha"]), HANG).unwrap();
    let start = |security: &[&str], metrics: u16| {
        let mut command = Command::new(BINARY);
        let listen = lab.host(0).socket(STREAM_PORT + metrics % 10).to_string();
        command.args(["spare", "--listen", &listen, "--metrics", &format!("0.0.0.0:{metrics}")]);
        let process = lab.host(0).spawn(command.args(security)).unwrap();
        wait_for_listener(&process, metrics, HANG).unwrap();
        process
    };
    let _plain = start(&[], 9701);
    let _tls = start(&["--keys", keys, "--name", "alpha"], 9702);
    let _insecure = start(&["--insecure"], 9703);
    let from_afar = |port| ask(lab.host(1), lab.host(0).socket(port), "GET /metrics");
    for port in [9701, 9702] {
        assert!(!from_afar(port).contains("hotspare"), "port {port} tells a stranger");
        let local = ask(lab.host(0), ([127, 0, 0, 1], port).into(), "GET /metrics");
        assert!(local.contains("hotspare_build_info"), "port {port}: {local}");
    }
    assert!(from_afar(9703).contains("hotspare_build_info"));
}
