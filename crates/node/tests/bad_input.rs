//! Everything a user or a network can get wrong: each is told with what to do about it, and the
//! guest goes on.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotspare_image::{NodeId, Term};
use hotspare_replica::frame::{FrameBuffer, FrameReader, HEADER_BYTES, Kind};
use hotspare_replica::message::{Hello, HostFacts, HostRole, VERSION_MAX, seal};
use hotspare_torture::lab::{Host, Process};
use hotspare_torture::protected::{HANG, STREAM_PORT};
use hotspare_torture::{Lab, protected::Engine};

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
const FAILED: Option<i32> = Some(125);
const DIR: &str = "/srv/hotspare-lab";

fn hotspare(arguments: &[&str]) -> Output {
    let state = env!("CARGO_TARGET_TMPDIR");
    let mut command = Command::new(BINARY);
    command.args(arguments).env("HOTSPARE_STATE", state).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn fails(arguments: &[&str], texts: &[&str]) {
    let output = hotspare(arguments);
    let said = said(&output);
    assert_eq!(output.status.code(), FAILED, "{arguments:?}: {said}");
    for text in texts {
        assert!(said.contains(text), "{arguments:?} lacks {text:?}: {said}");
    }
}

fn start(host: &Host, arguments: &[&str]) -> Process {
    host.spawn(Command::new(BINARY).args(arguments)).unwrap()
}

/// Waits until `process` says all of `texts` in one line of its standard error.
fn says(process: &Process, texts: &[&str]) {
    let all = |line: &hotspare_torture::lab::Line| {
        texts.iter().all(|text| line.text.contains(text)).then_some(())
    };
    let found = process.stderr().find(HANG, all);
    assert!(found.is_some(), "no {texts:?} in:\n{}", process.stderr().text());
}

/// Lets the guest of [`guest`] end, and sees that it was there to do so.
fn goes_on(host: &Host, primary: &Process) {
    assert!(primary.try_wait().is_none(), "it ended: {}", primary.stderr().text());
    fs::write(host.outside(format!("{DIR}/end")), b"").unwrap();
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(9), "{}", primary.stderr().text());
}

/// A guest that waits for [`goes_on`].
fn guest() -> [String; 3] {
    let script = format!("while [ ! -e {DIR}/end ]; do sleep 0.02; done; exit 9");
    ["sh".to_owned(), "-c".to_owned(), script]
}

fn run(host: &Host, options: &[&str]) -> Process {
    let mut command = Command::new(BINARY);
    command.args(["run", "--epoch", "50ms"]).args(options).arg("--").args(guest());
    host.spawn(&mut command).unwrap()
}

fn spare_address(lab: &Lab) -> String {
    lab.host(1).socket(STREAM_PORT).to_string()
}

#[test]
fn wrong_arguments_are_told_with_the_right_ones() {
    fails(&["run"], &["COMMAND", "--help"]);
    fails(&["run", "--no-such", "--", "true"], &["--no-such", "--help"]);
    fails(&["run", "--epoch", "100", "--", "true"], &["\"100\" needs a unit: us, ms or s"]);
    fails(&["run", "--epoch", "9h", "--", "true"], &["needs a unit"]);
    fails(&["run", "--files", "/data", "--", "true"], &["write shared:/PATH or replicate:/PATH"]);
    fails(&["run", "--service-address", "10.0.0.300/24", "--", "true"], &["10.0.0.300/24"]);
    fails(&["spare"], &["--listen"]);
    fails(&["spare", "--listen", "nonsense"], &["ADDRESS:PORT"]);
    fails(&["spare", "--listen", "192.0.2.1:7070"], &["no interface of this host has this"]);
    fails(&["spare", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"], &["--keys"]);
    fails(&["status", "--at", "127.0.0.1:1"], &["--keys"]);
    fails(&["switchover", "--guest", "no such guest"], &["no such guest runs on this host"]);
    fails(
        &["run", "--files", "replicate:/no/such/dir", "--", "true"],
        &["there is no directory /no/such/dir on this host", "make it first"],
    );
    fails(
        &["run", "--files", "shared:/no/such/dir", "--", "true"],
        &["there is no directory /no/such/dir on this host", "mount it first"],
    );
    fails(&["run", "--keys", "/no/such/keys", "--", "true"], &["/no/such/keys"]);
    let check = hotspare(&["check", "--no-such"]);
    assert_eq!(check.status.code(), Some(1), "2 would mean obstacles");
    assert!(hotspare(&["run", "--help"]).status.success());
    fails(
        &["run", "--guarantee", "output-commit", "--", "true"],
        &["output-commit", "--service-address"],
    );
}

#[test]
fn where_nothing_can_be_written_the_guest_goes_on() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for options in [&[][..], &["--json"]] {
        let mut command = Command::new(BINARY);
        command.args(["run", "--guest", "full", "--spare", "127.0.0.1:1"]).args(options);
        command.args(["--", "sh", "-c", "sleep 1; exit 3"]);
        command.env("HOTSPARE_STATE", env!("CARGO_TARGET_TMPDIR"));
        let ended = command.stdin(Stdio::null()).stdout(full()).stderr(full()).status().unwrap();
        assert_eq!(ended.code(), Some(3), "{options:?}");
    }
}

#[test]
fn a_program_that_ends_at_once_has_its_own_status_and_one_that_cannot_start_a_reason() {
    for (program, status) in [("/bin/true", 0), ("/bin/false", 1)] {
        let output = hotspare(&["run", "--guest", program, "--", program]);
        assert_eq!(output.status.code(), Some(status), "{}", said(&output));
        assert!(said(&output).contains(&format!("the guest ended with status {status}")));
    }
    fails(&["run", "--", "/no/such/program"], &["cannot start /no/such/program", "No such file"]);
    fails(&["run", "--", "/etc/hostname"], &["cannot start /etc/hostname", "Exec format error"]);
    fails(&["run", "--", "bin/true2"], &["counts from --directory /"]);
}

#[test]
fn a_port_in_use_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    fails(&["spare", "--listen", &address], &[&address, "another program has this port"]);
    fails(
        &["run", "--listen", &address, "--", "sleep", "9"],
        &[&address, "another program has this port"],
    );
}

#[test]
fn missing_privilege_and_missing_features_are_told_by_name() {
    let drop = ["--inh-caps=-all", "--bounding-set=-sys_ptrace", BINARY];
    let hosts = [
        ("setpriv", &["--reuid=65534", BINARY][..], "run it as root"),
        ("setpriv", &drop, "CAP_SYS_PTRACE was taken away"),
        (
            "unshare",
            &["-m", "sh", "-c", "mount -t tmpfs none /dev; exec \"$0\" \"$@\"", BINARY],
            "modprobe fuse",
        ),
    ];
    for (tool, words, told) in hosts {
        for command in [&["run", "--", "true"][..], &["spare", "--listen", "127.0.0.1:0"]] {
            let mut started = Command::new(tool);
            let output = started.args(words).args(command).stdin(Stdio::null()).output().unwrap();
            let said = said(&output);
            assert_eq!(output.status.code(), FAILED, "{said}");
            assert!(said.contains(told), "{said}");
        }
    }
}

#[test]
fn an_unreachable_spare_is_told_once_and_the_guest_goes_on() {
    let lab = Lab::new(2).unwrap();
    let primary = run(lab.host(0), &["--insecure", "--spare", &spare_address(&lab)]);
    says(&primary, &["cannot connect", "is `hotspare spare --listen` running there?"]);
    let unknown = run(lab.host(1), &["--insecure", "--spare", "no.such.host.invalid:7070"]);
    says(&unknown, &["no.such.host.invalid:7070 is not a HOST:PORT that can be looked up"]);
    thread::sleep(Duration::from_secs(1));
    assert_eq!(primary.stderr().text().matches("cannot connect").count(), 1);
    goes_on(lab.host(0), &primary);
    goes_on(lab.host(1), &unknown);
}

#[test]
fn memory_in_plain_text_over_a_network_is_refused_on_both_sides() {
    let lab = Lab::new(2).unwrap();
    let careful = start(lab.host(1), &["spare", "--listen", &spare_address(&lab)]);
    let primary = run(lab.host(0), &["--spare", &spare_address(&lab)]);
    says(&primary, &["in plain text", "hotspare keys", "--insecure"]);
    goes_on(lab.host(0), &primary);
    fs::remove_file(lab.host(0).outside(format!("{DIR}/end"))).unwrap();
    let careless = run(lab.host(0), &["--insecure", "--spare", &spare_address(&lab)]);
    says(&careful, &["in plain text", "hotspare keys", "--insecure"]);
    goes_on(lab.host(0), &careless);
    assert!(careful.try_wait().is_none());
}

#[test]
fn other_keys_are_refused_and_a_stranger_gets_nothing() {
    let lab = Lab::new(2).unwrap();
    for (host, name) in lab.hosts().iter().zip(["alpha", "beta"]) {
        let mut keys = Command::new(BINARY);
        host.run(keys.args(["keys", &format!("{DIR}/keys"), name]), HANG).unwrap();
    }
    let (keys, address) = (format!("{DIR}/keys"), spare_address(&lab));
    let spare = ["spare", "--listen", &address, "--keys", &keys, "--name", "beta"];
    let spare = start(lab.host(1), &spare);
    let options = ["--spare", &address, "--keys", &keys, "--name", "alpha"];
    let primary = run(lab.host(0), &options);
    says(&primary, &["TLS handshake", "the same `hotspare keys` directory has issued"]);
    says(&spare, &["TLS handshake", "the same `hotspare keys` directory has issued"]);
    let to = lab.host(1).socket(STREAM_PORT);
    // A stranger that speaks the protocol, but has no certificate.
    let got = lab.client().inside(move || {
        let mut stream = TcpStream::connect(to).unwrap();
        let _ = stream.write_all(&hello(2));
        let _ = stream.shutdown(Shutdown::Write);
        let mut got = Vec::new();
        let _ = stream.read_to_end(&mut got);
        got
    });
    assert!(got.len() < 64 && !got.windows(4).any(|four| four == b"HSpr"), "{got:?}");
    let missing = ["run", "--keys", &keys, "--name", "gamma", "--", "true"];
    let missing = start(lab.host(0), &missing);
    assert_eq!(missing.wait(HANG).unwrap().code(), FAILED);
    says(&missing, &["gamma"]);
    assert!(spare.try_wait().is_none());
    goes_on(lab.host(0), &primary);
}

/// First words of a spare that speaks only protocol `version`.
fn hello(version: u32) -> Vec<u8> {
    let hello = Hello {
        version_min: version,
        version_max: version,
        role: HostRole::Spare,
        node: NodeId(7),
        guest: None,
        term: Term(0),
        facts: HostFacts::default(),
        heart_port: 1,
        listen_port: None,
    };
    seal(&mut FrameBuffer::default(), Kind::Hello, &hello).to_vec()
}

#[test]
fn a_spare_of_another_version_or_another_kernel_is_refused_in_a_sentence() {
    for (version, told) in [
        (99, &["speaks protocol", "upgrade hotspare on the primary"][..]),
        (VERSION_MAX, &["the hosts run different kernels", "boot the same build on both"]),
    ] {
        let lab = Lab::new(2).unwrap();
        let address = lab.host(1).socket(STREAM_PORT);
        let listener = lab.host(1).inside(move || TcpListener::bind(address).unwrap());
        let primary = run(lab.host(0), &["--insecure", "--spare", &address.to_string()]);
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&hello(version)).unwrap();
        let mut frames = FrameReader::default();
        assert_eq!(frames.read(&mut stream).unwrap().kind, Kind::Hello);
        assert_eq!(frames.read(&mut stream).unwrap().kind, Kind::Refuse, "it is told, too");
        drop(stream);
        says(&primary, told);
        goes_on(lab.host(0), &primary);
    }
}

/// Passes bytes on; damages, or cuts, the stream to the spare after so many, while that is not 0.
fn middleman(lab: &Lab, after: Arc<AtomicU64>, cut: bool) {
    let address = lab.host(0).socket(STREAM_PORT);
    let to = lab.host(1).socket(STREAM_PORT);
    let listener = lab.host(0).inside(move || TcpListener::bind(address).unwrap());
    lab.host(0).thread(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(to) else { continue };
            let (back, forth) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            thread::spawn(move || carry(back, near, 0, false));
            let after = after.clone();
            thread::spawn(move || carry(forth, far, after.load(Ordering::SeqCst), cut));
        }
    });
}

fn carry(mut from: TcpStream, mut to: TcpStream, after: u64, cut: bool) {
    let (mut buffer, mut done) = ([0u8; 4096], 0);
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let place = after.checked_sub(done).filter(|place| after > 0 && *place < bytes as u64);
        if let Some(place) = place {
            if cut {
                let _ = to.write_all(&buffer[..place as usize]);
                break;
            }
            buffer[place as usize] ^= 0x40;
        }
        done += bytes as u64;
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn damaged_and_cut_streams_are_told_and_mended_by_a_new_one() {
    for cut in [false, true] {
        let lab = Lab::new(2).unwrap();
        // Within the first checkpoint, whatever the length of the greeting.
        let after = Arc::new(AtomicU64::new(HEADER_BYTES as u64 + 100_000));
        middleman(&lab, after.clone(), cut);
        let spare = ["spare", "--insecure", "--json", "--listen", &spare_address(&lab)];
        let spare = start(lab.host(1), &spare);
        let through = lab.host(0).socket(STREAM_PORT).to_string();
        let primary = run(lab.host(0), &["--insecure", "--json", "--spare", &through]);
        let told = if cut { "stream" } else { "checksum of a" };
        says(&spare, &[told]);
        let told = if cut { "the stream to spare" } else { "the spare leaves: checksum of a" };
        says(&primary, &[told]);
        assert!(!primary.stdout().text().contains("protected"));
        after.store(0, Ordering::SeqCst);
        let committed = |line: &hotspare_torture::lab::Line| {
            line.text.contains("\"event\":\"epoch\"").then_some(())
        };
        assert!(primary.stdout().find(HANG, committed).is_some(), "{}", primary.stderr().text());
        // The middleman passes no heartbeats on: a spare that is not heard protects nobody.
        says(&primary, &["NOT PROTECTED", "no heartbeat passes", "UDP"]);
        assert!(!primary.stdout().text().contains("protected"));
        goes_on(lab.host(0), &primary);
    }
}

#[test]
fn a_full_disk_on_the_spare_is_told_and_the_guest_goes_on() {
    let lab = Lab::new(2).unwrap();
    let small = format!("{DIR}/small");
    let spare = lab.host(1);
    let mount = format!("mkdir {small}; mount -t tmpfs -o size=1m none {small}");
    spare.run(Command::new("sh").args(["-c", &mount]), HANG).unwrap();
    fs::create_dir(lab.host(0).outside(&small)).unwrap();
    fs::write(lab.host(0).outside(format!("{small}/big")), vec![7; 3 << 20]).unwrap();
    let address = spare_address(&lab);
    let options = ["--insecure", "--json", "--spare", &address];
    let held = start(spare, &["spare", "--insecure", "--listen", &address]);
    let rule = format!("replicate:{small}");
    let primary = run(lab.host(0), &[&options[..], &["--files", &rule]].concat());
    says(&held, &["No space left on device", &small]);
    assert!(held.try_wait().is_none());
    goes_on(lab.host(0), &primary);
    drop(held);
    fs::remove_file(lab.host(0).outside(format!("{DIR}/end"))).unwrap();
    // The file for checkpoints that are too large for memory.
    let mut command = Command::new(BINARY);
    command.env("TMPDIR", &small).args(["spare", "--insecure", "--listen", &address]);
    let held = spare.spawn(&mut command).unwrap();
    let script = format!("x=$(head -c 50000000 /dev/urandom | base64 -w0); {}", guest()[2]);
    let mut command = Command::new(BINARY);
    command.arg("run").args(options).args(["--", "bash", "-c", &script]);
    let primary = lab.host(0).spawn(&mut command).unwrap();
    says(&held, &["is the disk full?"]);
    assert!(held.try_wait().is_none());
    goes_on(lab.host(0), &primary);
}

#[test]
fn an_address_that_somebody_has_is_told() {
    let lab = Lab::new(2).unwrap();
    let cidr = hotspare_torture::lab::SERVICE_CIDR;
    lab.client().add_address(cidr).unwrap();
    let primary = run(lab.host(0), &["--service-address", cidr]);
    says(&primary, &["10.77.0.50 answers on this network already", "end the other one"]);
    goes_on(lab.host(0), &primary);
    let elsewhere = start(lab.host(1), &["run", "--service-address", "10.9.9.9/24", "--", "true"]);
    assert_eq!(elsewhere.wait(HANG).unwrap().code(), FAILED);
    says(&elsewhere, &["no interface of this host", "--service-bridge"]);
}

#[test]
fn two_guests_of_one_name_on_a_host_are_refused() {
    let lab = Lab::new(1).unwrap();
    let first = run(lab.host(0), &["--guest", "twin"]);
    let control = lab.host(0).outside("/run/hotspare").join(format!("{}.sock", first.pid()));
    while !Path::new(&control).exists() {
        assert!(first.try_wait().is_none(), "{}", first.stderr().text());
        thread::sleep(Duration::from_millis(5));
    }
    let second = run(lab.host(0), &["--guest", "twin"]);
    assert_eq!(second.wait(HANG).unwrap().code(), FAILED);
    says(&second, &["\"twin\" runs on this host already", "--guest"]);
    goes_on(lab.host(0), &first);
}

#[test]
fn a_guest_keeps_its_limit_of_open_files_and_the_agent_has_enough_for_thousands() {
    let lab = Lab::new(2).unwrap();
    let engine = Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(100),
        service_cidr: None,
        replicated: vec![],
        more: vec![],
    };
    let _spare = engine.spare(lab.host(1)).unwrap();
    let script = format!(
        "ulimit -Sn; ulimit -Hn; ulimit -Sn 6000; for i in $(seq 5000); do \
         exec {{fd}}</etc/hostname; done; {}",
        guest()[2]
    );
    let address = spare_address(&lab);
    let mut command = Command::new("prlimit");
    command.args(["--nofile=200:7000", BINARY, "run", "--insecure", "--json", "--spare"]);
    command.args([&address, "--", "bash", "-c", &script]);
    let primary = lab.host(0).spawn(&mut command).unwrap();
    Engine::protected(&primary).unwrap();
    let said = primary.stdout().text();
    let limits: Vec<&str> = said.lines().take(2).collect();
    assert_eq!(limits, ["200", "7000"], "{said}");
    let hold = || {
        let last = primary.stdout().text().lines().filter(|line| line.contains("epoch")).count();
        let held = fs::read_dir("/proc").unwrap().flatten().any(|process| {
            let files = fs::read_dir(process.path().join("fd"));
            files.is_ok_and(|files| files.count() > 5000)
        });
        (held, last)
    };
    while !hold().0 {
        assert!(primary.try_wait().is_none(), "{}", primary.stderr().text());
        thread::sleep(Duration::from_millis(20));
    }
    let before = hold().1;
    while hold().1 < before + 5 {
        assert!(primary.try_wait().is_none(), "{}", primary.stderr().text());
        thread::sleep(Duration::from_millis(20));
    }
    goes_on(lab.host(0), &primary);
}

#[test]
fn a_crowd_of_strangers_is_hung_up_on_and_hosts_come_in_when_it_is_gone() {
    // The agent meets 512 at a time, with a thread each.
    const CROWD: usize = 600;
    let lab = Lab::new(2).unwrap();
    let to = lab.host(1).socket(STREAM_PORT);
    let listen = to.to_string();
    let spare = start(lab.host(1), &["spare", "--insecure", "--listen", &listen]);
    let threads_of = format!("/proc/{}/status", spare.pid());
    let (crowd, most) = lab.client().inside(move || {
        let knock = || {
            thread::sleep(Duration::from_millis(10));
            TcpStream::connect(to)
        };
        // It listens a moment after it has started.
        let first = std::iter::repeat_with(knock).take(1000).find_map(Result::ok);
        let mut crowd: Vec<_> = first.into_iter().collect();
        crowd.extend((0..CROWD).map(|_| TcpStream::connect(to).unwrap()));
        let mut last = crowd.last().unwrap();
        last.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let (begun, mut most) = (Instant::now(), 0);
        // Until it is hung up on: all before it have been met by then, and those that say nothing
        // leave after a while.
        loop {
            most = most.max(threads(&threads_of));
            match last.read(&mut [0u8; 1]) {
                Ok(0) => break,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => panic!("a stranger was told {other:?}"),
            }
            assert!(begun.elapsed() < HANG, "nobody hangs up");
        }
        (crowd, most)
    });
    assert!((256..CROWD).contains(&most), "{most} threads");
    drop(crowd);
    let primary = run(lab.host(0), &["--insecure", "--spare", &listen]);
    says(&primary, &["protected from epoch"]);
    goes_on(lab.host(0), &primary);
}

fn threads(status: &str) -> usize {
    let status = fs::read_to_string(status).unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("Threads:")).unwrap();
    count.trim().parse().unwrap()
}
