//! With an arbiter only one host speaks for a guest, whatever dies, stands still or is cut off.

mod places;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use hotspare_torture::chain::{Held, Scene, await_ready, says, takeovers};
use hotspare_torture::clients::Connection;
use hotspare_torture::clock::Instant;
use hotspare_torture::etcd::Etcd;
use hotspare_torture::lab::{Host, LAB_DIR, Lab, Process, SERVICE_CIDR, SERVICE_V4};
use hotspare_torture::protected::{Engine, HANG};
use nix::sys::signal::Signal;
use places::{S3, make_keys};

/// The program of this build, or another that is to be tested.
static BINARY: LazyLock<String> = LazyLock::new(|| {
    let built = || env!("CARGO_BIN_EXE_hotspare").to_owned();
    std::env::var("HOTSPARE_BIN").unwrap_or_else(|_| built())
});
const EPOCH: Duration = Duration::from_millis(100);
const PORT: u16 = 6379;
/// Of `--arbiter etcd://…`.
const LEASE: Duration = Duration::from_secs(1);
/// What is looked at is not how long it takes.
const PATIENT: [&str; 2] = ["--silence", "500ms"];

/// Hosts, of which the last has the arbiter.
fn scene(hosts: usize, guarantee: &str) -> Scene {
    let lab = Lab::new(hosts + 1).unwrap();
    let words = [&["--guarantee", guarantee], &PATIENT[..]].concat();
    let engine = Engine {
        binary: BINARY.as_str().into(),
        epoch: EPOCH,
        service_cidr: Some(SERVICE_CIDR.into()),
        replicated: vec![],
        more: words.into_iter().map(str::to_owned).collect(),
    };
    Scene { lab, engine }
}

/// A protected Redis on host 0, and its spare on host 1.
fn protect(scene: &mut Scene, place: &str) -> (Process, Process) {
    scene.engine.more.extend(["--guest", "redis", "--arbiter", place].map(str::to_owned));
    let spare_words = [&PATIENT[..], &["--arbiter", place]].concat();
    let spare = scene.engine.spare_with(scene.host(1), &spare_words).unwrap();
    let primary = scene.run(&[1]);
    Engine::protected(&primary).unwrap_or_else(|e| panic!("{e}\nspare: {}", spare.said()));
    await_ready(scene, &primary, 1);
    (primary, spare)
}

/// Counts packets that leave a host with the guest's address.
struct Counter<'a>(&'a Host);

impl<'a> Counter<'a> {
    fn new(host: &'a Host) -> Self {
        let rules = format!(
            "add table ip watch; \
             add chain ip watch out {{ type filter hook postrouting priority 300; }}; \
             add rule ip watch out ip saddr {SERVICE_V4} counter"
        );
        host.run(Command::new("nft").arg(rules), HANG).unwrap();
        Self(host)
    }

    fn packets(&self) -> u64 {
        let mut list = Command::new("nft");
        let said = self.0.run(list.args(["-j", "list", "table", "ip", "watch"]), HANG).unwrap();
        let (_, rest) = said.split_once("\"packets\": ").expect("a counter");
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    }
}

fn cut(scene: &Scene, a: usize, b: usize) {
    scene.lab.cut(scene.host(a), scene.host(b)).unwrap();
    scene.lab.cut(scene.host(b), scene.host(a)).unwrap();
}

#[test]
fn no_client_notices_the_death_of_the_primary() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the death", &spare);
    load.noticed_nothing();
    let record = etcd.record("redis");
    assert_eq!((&record["term"], &record["at_once"]), (&2.into(), &true.into()), "{record}");
}

/// The spare is no heir any more while protection is paused, and one again afterwards.
#[test]
fn no_client_notices_a_pause_of_the_protection() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    let said = scene.hotspare(0, &["pause"]);
    assert!(said.is_ok(), "{said:?}\n{}", primary.said());
    load.goes_on("paused", &primary);
    assert_eq!(takeovers(&spare), 0, "{}", spare.said());
    let said = scene.hotspare(0, &["resume"]);
    assert!(said.is_ok(), "{said:?}\n{}", primary.said());
    await_ready(&scene, &primary, 1);
    load.goes_on("resumed", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the death", &spare);
    load.noticed_nothing();
}

/// The spare may speak only when the arbiter knows that the old primary does not want it back.
#[test]
fn no_client_notices_a_switchover() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    let said = scene.hotspare(0, &["switchover"]);
    assert!(said.is_ok(), "{said:?}\n{}\n{}", primary.said(), spare.said());
    load.goes_on("after the switchover", &spare);
    load.noticed_nothing();
    let record = etcd.record("redis");
    assert_eq!((&record["term"], record["heirs"].as_array().map(Vec::len)), (&2.into(), Some(0)));
}

#[test]
fn under_timeline_a_guest_moves_at_once_when_its_primary_wants_it() {
    let mut scene = scene(2, "timeline");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    scene.set("key", "value");
    let said = scene.hotspare(0, &["switchover"]);
    assert!(said.is_ok(), "{said:?}\n{}\n{}", primary.said(), spare.said());
    assert_eq!(scene.get("key").as_deref(), Some("value"));
}

/// Answers one line and is done.
const ONE_ANSWER: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
connection, _ = listener.accept()
connection.sendall(connection.makefile('rb').readline())
"#;

#[test]
fn the_last_words_of_a_guest_reach_its_client() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let place = etcd.place();
    scene.engine.more.extend(["--guest", "one", "--arbiter", &place].map(str::to_owned));
    let spare_words = [&PATIENT[..], &["--arbiter", &place]].concat();
    let spare = scene.engine.spare_with(scene.host(1), &spare_words).unwrap();
    let words = ["python3", "-c", ONE_ANSWER, &SERVICE_V4.to_string(), &PORT.to_string()];
    let words = words.map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    Engine::protected(&primary).unwrap();
    await_ready(&scene, &primary, 1);
    let server = SocketAddr::from((SERVICE_V4, PORT));
    let answer = scene.lab.client().inside(move || {
        // It takes one connection.
        let mut connection = Connection::open_when_it_listens(server, HANG)?;
        connection.send(b"last words\n")?;
        connection.line().map(<[u8]>::to_vec)
    });
    assert_eq!(answer.unwrap(), b"last words", "{}", primary.said());
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(0), "{}", primary.said());
    let record = etcd.record("one");
    assert_eq!(
        (&record["over"], record["heirs"].as_array().map(Vec::len)),
        (&true.into(), Some(0))
    );
    assert_eq!(takeovers(&spare), 0, "{}", spare.said());
}

/// The agent stands still for longer than its lease while the guest beside it runs on. Whatever
/// it finds to do when it wakes up, nothing of that may leave the host.
fn a_stopped_agent(guarantee: &str, path: &str) {
    let mut scene = scene(2, guarantee);
    scene.engine.more.extend(["--path", path].map(str::to_owned));
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let counter = Counter::new(scene.host(0));
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    let speaking = counter.packets();
    // Through the spare little leaves here: what clients say before that is in the path.
    assert!(speaking > 0 || path == "spare", "the counter counts nothing");
    primary.signal(Signal::SIGSTOP).unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the takeover", &spare);
    (Instant::now() + LEASE).sleep_until();
    let stopped = counter.packets();
    primary.signal(Signal::SIGCONT).unwrap();
    says(&primary, "another host has taken over (term 2)");
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(75), "{}", primary.said());
    assert_eq!(counter.packets(), stopped, "packets left the host: {}", primary.said());
    load.goes_on("after it woke up", &spare);
    if guarantee == "output-commit" {
        load.noticed_nothing();
    }
}

#[test]
fn an_agent_that_stood_still_lets_nothing_out() {
    a_stopped_agent("output-commit", "direct");
}

#[test]
fn an_agent_that_stood_still_lets_nothing_out_through_the_spare() {
    a_stopped_agent("output-commit", "spare");
}

#[test]
fn under_timeline_an_agent_that_stood_still_lets_nothing_out_either() {
    a_stopped_agent("timeline", "direct");
}

/// Both hosts live and reach the arbiter, not each other: one of them goes on.
fn a_cut_link(guarantee: &str) {
    let mut scene = scene(2, guarantee);
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    cut(&scene, 0, 1);
    load.goes_on("after the cut", &primary);
    // Whoever has lost knows it.
    let deadline = Instant::now() + HANG;
    let heir = loop {
        let record = etcd.record("redis");
        match (record["term"].as_u64(), record["heirs"].as_array().map(Vec::len)) {
            (Some(1), Some(0)) => break &primary,
            (Some(2), _) if primary.try_wait().is_some() => break &spare,
            _ => assert!(Instant::now() < deadline, "{record}\n{}", primary.said()),
        }
    };
    if std::ptr::eq(heir, &primary) {
        says(&spare, "NoHeir");
        assert_eq!(takeovers(&spare), 0, "{}", spare.said());
    } else {
        assert_eq!(primary.try_wait().and_then(|status| status.code()), Some(75));
    }
    load.goes_on("in the end", heir);
    if guarantee == "output-commit" {
        load.noticed_nothing();
    }
}

#[test]
fn of_two_hosts_that_do_not_hear_each_other_one_goes_on() {
    a_cut_link("output-commit");
}

#[test]
fn under_timeline_of_two_hosts_that_do_not_hear_each_other_one_goes_on() {
    a_cut_link("timeline");
}

/// A primary that reaches nobody is silent when the other host speaks.
#[test]
fn a_primary_that_is_cut_off_from_all_is_silent_and_the_spare_goes_on() {
    let mut scene = scene(2, "timeline");
    let host = scene.lab.host(2).clone();
    let etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let counter = Counter::new(scene.host(0));
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    cut(&scene, 0, 1);
    cut(&scene, 0, 2);
    let (_, at) = Engine::taken_over(&spare).unwrap();
    let then = counter.packets();
    load.goes_on("after the takeover", &spare);
    assert_eq!(counter.packets(), then, "the old primary speaks on");
    says(&primary, "THE LEASE IS OVER");
    let over = |line: &hotspare_torture::lab::Line| {
        line.text.contains("THE LEASE IS OVER").then_some(line.at)
    };
    assert!(primary.stderr().find(HANG, over).unwrap() < at, "two have spoken");
    scene.lab.heal().unwrap();
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(75), "{}", primary.said());
    drop(load);
}

#[test]
fn while_the_spare_acknowledges_the_guest_goes_on_without_the_arbiter() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let mut etcd = Etcd::start(&host);
    let (primary, spare) = protect(&mut scene, &etcd.place());
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    etcd.kill();
    (Instant::now() + LEASE * 2).sleep_until();
    load.goes_on("without the arbiter", &primary);
    says(&primary, "THE ARBITER DOES NOT ANSWER");
    // Nobody can say now that the spare will not take over.
    scene.host(1).kill().unwrap();
    says(&primary, "THE LEASE IS OVER");
    let waiting = Instant::now();
    assert!(!load.answered_after(waiting, LEASE), "it speaks alone: {}", primary.said());
    etcd.start_again();
    load.goes_on("with the arbiter again", &primary);
    says(&primary, "the arbiter answers again");
    assert_eq!(etcd.record("redis")["term"], 1);
    drop(spare);
    load.noticed_nothing();
}

/// Words of `hotspare run` for a guest that does nothing for so long.
fn sleeper(place: &str, seconds: &str) -> Vec<String> {
    let words = ["run", "--guest", "sleeper", "--arbiter", place, "--", "sleep", seconds];
    words.map(str::to_owned).to_vec()
}

/// Of many that start the same guest at once, one runs it. The others say who does.
fn contenders(lab: &Lab, place: &str) {
    let mut words = sleeper(place, "6");
    words.splice(1..1, ["--lease", "2s"].map(str::to_owned));
    let start = |host: &std::sync::Arc<Host>| {
        let mut command = Command::new(&*BINARY);
        command.args(&words);
        command.env("AWS_ACCESS_KEY_ID", "a").env("AWS_SECRET_ACCESS_KEY", "b");
        host.spawn(&mut command).unwrap()
    };
    let hosts: Vec<_> = lab.hosts().iter().take(lab.hosts().len() - 1).collect();
    let all: Vec<Process> = hosts.iter().map(|host| start(host)).collect();
    let codes: Vec<i32> =
        all.iter().map(|one| one.wait(HANG).unwrap().code().unwrap_or(-1)).collect();
    let said: Vec<String> = all.iter().map(Process::said).collect();
    assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?}: {said:#?}");
    for (_, said) in codes.iter().zip(&said).filter(|(code, _)| **code != 0) {
        assert!(said.contains("runs on another host"), "{said}");
    }
}

#[test]
fn of_many_that_start_a_guest_with_etcd_one_runs_it() {
    let lab = Lab::new(7).unwrap();
    let etcd = Etcd::start(lab.host(6));
    contenders(&lab, &etcd.place());
    let record = etcd.record("sleeper");
    assert_eq!((&record["over"], &record["term"]), (&true.into(), &1.into()), "{record}");
}

#[test]
fn of_many_that_start_a_guest_with_s3_one_runs_it() {
    let lab = Lab::new(5).unwrap();
    let store = S3::start(lab.host(4));
    contenders(&lab, &store.place("terms"));
}

/// The program with keys for a store in its environment.
fn with_keys() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hotspare-with-keys");
    let keys = "AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b";
    fs::write(&path, format!("#!/bin/sh\n{keys} exec {} \"$@\"\n", *BINARY)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_failover_with_s3() {
    let mut scene = scene(2, "output-commit");
    let host = scene.lab.host(2).clone();
    let store = S3::start(&host);
    let place = store.place("terms");
    scene.engine.binary = with_keys();
    let (primary, spare) = protect(&mut scene, &place);
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    load.goes_on("after the death", &spare);
    load.noticed_nothing();
}

fn run(host: &Host, words: &[String], environment: &[(&str, &str)]) -> Result<String, String> {
    let mut command = Command::new(&*BINARY);
    command.args(words).envs(environment.iter().copied());
    host.run(&mut command, HANG).map_err(|error| error.to_string())
}

#[test]
fn etcd_with_tls_and_names_lets_in_whoever_has_both() {
    let lab = Lab::new(2).unwrap();
    let (own, host) = (lab.host(0), lab.host(1));
    make_keys(&[host, own]);
    let etcd = Etcd::start_with(host, true);
    etcd.ctl(&["user", "add", "root:secret"]).unwrap();
    etcd.ctl(&["user", "grant-role", "root", "root"]).unwrap();
    etcd.ctl(&["auth", "enable"]).unwrap();
    let at = etcd.place().replace("etcd://", "etcds://");
    let keys = format!("cert={LAB_DIR}/client.crt&key={LAB_DIR}/client.key");
    let good = format!("{at}?ca={LAB_DIR}/ca.crt&{keys}");
    let root = [("HOTSPARE_ARBITER_USER", "root"), ("HOTSPARE_ARBITER_PASSWORD", "secret")];
    run(own, &sleeper(&good, "0.1"), &root).unwrap();
    run(own, &sleeper(&good, "0.1"), &root).unwrap();
    let wrong = [("HOTSPARE_ARBITER_USER", "root"), ("HOTSPARE_ARBITER_PASSWORD", "guess")];
    for (place, environment, wanted) in [
        (&good, &wrong[..], "HOTSPARE_ARBITER_PASSWORD"),
        (&good, &[], "HOTSPARE_ARBITER_USER"),
        (&format!("{at}?ca={LAB_DIR}/ca.crt"), &root, "TLS"),
        (&format!("{at}?{keys}"), &root, "`?ca=`"),
        (&etcd.place(), &root, "is it `etcds://`"),
    ] {
        let said = run(own, &sleeper(place, "0.1"), environment).unwrap_err();
        assert!(said.contains("the arbiter cannot be used") && said.contains(wanted), "{said}");
    }
}

#[test]
fn what_is_wrong_with_an_arbiter_is_said_before_the_guest_starts() {
    let lab = Lab::new(2).unwrap();
    let (own, host) = (lab.host(0), lab.host(1));
    let fails = |place: &str, wanted: &str| {
        let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        let mut words = sleeper(place, "1");
        words.splice(6.., ["touch", &format!("{LAB_DIR}/ran")].map(str::to_owned));
        let said = run(own, &words, &keys).unwrap_err();
        assert!(said.contains(wanted), "{place}: {said}");
        assert!(!own.outside(format!("{LAB_DIR}/ran")).exists(), "the guest ran");
    };
    let store = S3::start(host);
    let nobody = format!("etcd://{}/hs", host.socket(2379));
    fails(&nobody, "is etcd up");
    fails(&store.place("nowhere"), "there is no bucket");
    fails(&store.place("terms").replace(":5000", ":5001"), "is `endpoint=` right");
    let etcd = Etcd::start(host);
    etcd.ctl(&["put", "/hs/sleeper", "something else"]).unwrap();
    fails(&etcd.place(), "is no record of Hotspare");
}

/// The hosts have to agree about who decides.
#[test]
fn a_spare_with_another_arbiter_is_told() {
    let lab = Lab::new(3).unwrap();
    let etcd = Etcd::start(lab.host(2));
    let mut engine = Engine {
        binary: BINARY.as_str().into(),
        epoch: EPOCH,
        service_cidr: None,
        replicated: vec![],
        more: vec![],
    };
    let spare = engine.spare(lab.host(1)).unwrap();
    engine.more.extend(["--arbiter".into(), etcd.place()]);
    let guest = ["sleep".to_owned(), "100".to_owned()];
    let _primary = engine.run(lab.host(0), &[lab.host(1)], &guest).unwrap();
    says(&spare, "start both with the same --arbiter");
}
