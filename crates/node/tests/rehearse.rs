//! `hotspare rehearse`: a copy of the ghost runs and is thrown away, and nobody else notices.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use hotspare_torture::Lab;
use hotspare_torture::chain::{Held, Scene, descendants};
use hotspare_torture::lab::{Host, LAB_DIR, Process, SERVICE_CIDR, SERVICE_V4, SERVICE_V6};
use hotspare_torture::protected::{Engine, HANG, wait_for_service};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
const PORT: u16 = 6379;
/// What is tried is looked at here, not how soon somebody is missed.
const PATIENT: [&str; 2] = ["--silence", "500ms"];

fn data() -> String {
    format!("{LAB_DIR}/data")
}

/// Two hosts; the guests have a replicated directory, and clients notice no failover.
fn scene() -> Scene {
    let lab = Lab::new(2).unwrap();
    fs::create_dir_all(lab.host(0).outside(data())).unwrap();
    let more = ["--guarantee", "output-commit"].iter().chain(&PATIENT);
    let engine = Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(50),
        service_cidr: Some(SERVICE_CIDR.to_owned()),
        replicated: vec![data()],
        more: more.map(|word| (*word).to_owned()).collect(),
    };
    Scene { lab, engine }
}

/// A Redis in the directory, with a file of it open.
fn start_redis(scene: &Scene) -> Process {
    let data = data();
    let words = ["redis-server", "--bind", "*", "--protected-mode", "no", "--save", ""];
    let more = ["--dir", &data, "--appendonly", "yes"];
    let words: Vec<String> = words.iter().chain(&more).map(|word| (*word).to_owned()).collect();
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    wait_for_service(scene.lab.client(), (SERVICE_V4, PORT).into(), HANG).unwrap();
    Engine::protected(&primary).unwrap();
    primary
}

/// Exit status and output of a rehearsal on host 1.
fn rehearse(scene: &Scene, words: &[&str]) -> (i32, Process) {
    let process = begin(scene, words);
    let status = process.wait(HANG).unwrap();
    (status.code().unwrap(), process)
}

fn begin(scene: &Scene, words: &[&str]) -> Process {
    let mut command = Command::new(BINARY);
    scene.host(1).spawn(command.arg("rehearse").args(words)).unwrap()
}

/// The report in the output of a rehearsal.
fn report(process: &Process) -> Value {
    let said = process.stdout().text();
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {}", process.said()))
}

/// All files below a directory with their content.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            let content = fs::read(entry.path()).unwrap();
            found.push((entry.path().to_string_lossy().into_owned(), content));
        }
    }
    found.sort();
    found
}

/// Waits until nothing is left of the stages below an agent, nor of `sleep`s.
fn comes_to_nothing(agent: &Process, mark: &str) {
    let deadline = Instant::now() + HANG;
    loop {
        let sleeping = runs(mark);
        let ghosts = descendants(agent.pid(), "redis-server").len();
        if !sleeping && ghosts <= 1 {
            return;
        }
        assert!(Instant::now() < deadline, "sleeps {sleeping}, {ghosts} Redis\n{}", agent.said());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether some process was started with this word.
fn runs(word: &str) -> bool {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let mut lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.any(|line| line.split(|byte| *byte == 0).any(|found| found == word.as_bytes()))
}

fn await_running(word: &str, agent: &Process, rehearsal: &Process) {
    let deadline = Instant::now() + HANG;
    while !runs(word) {
        let said = || format!("{}\n{}", agent.said(), rehearsal.said());
        assert!(Instant::now() < deadline && rehearsal.try_wait().is_none(), "{}", said());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_mounted(process: i32, what: &str) -> bool {
    fs::read_to_string(format!("/proc/{process}/mounts")).unwrap().contains(what)
}

fn history(host: &Host, event: &str) -> Vec<Value> {
    let mut command = Command::new(BINARY);
    let told = host.run(command.args(["history", "--json"]), HANG).unwrap_or_default();
    let records = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["event"] == event).collect()
}

/// The copy answers on the guest's address and may do what it likes: neither the guest, its
/// clients, the ghost nor the spare's files change.
#[test]
fn a_copy_is_tried_and_nobody_notices() {
    let scene = scene();
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = start_redis(&scene);
    scene.set("stays", "as it was");
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    let probe = "redis-cli -h $HOTSPARE_ADDRESS get stays && \
                 redis-cli -h $HOTSPARE_ADDRESS set stays changed && \
                 redis-cli -h $HOTSPARE_ADDRESS save && ls -l $PWD/ > /dev/null && \
                 touch /srv/hotspare-lab/data/of-the-probe";
    let (status, process) = rehearse(&scene, &["--json", "--probe", probe]);
    let report = report(&process);
    assert_eq!((status, &report["passed"]), (0, &true.into()), "{}\n{report:#}", spare.said());
    let said = report["probe"]["output"].as_str().unwrap();
    assert!(said.starts_with("as it was\nOK\nOK\n"), "{said}");
    assert!(report["copied_bytes"].as_u64().unwrap() > 1 << 20, "{report:#}");
    assert!(report["files_bytes"].as_u64().unwrap() > 0 && report["followed"].is_u64());
    load.goes_on("after", &primary);
    load.noticed_nothing();
    assert_eq!(scene.get("stays").as_deref(), Some("as it was"));
    let seen = history(scene.host(1), "rehearsed");
    assert_eq!((seen.len(), &seen[0]["passed"]), (1, &true.into()));
    let directory = scene.host(1).outside(data());
    let names: Vec<String> = files(&directory).into_iter().map(|(name, _)| name).collect();
    let odd = |name: &&String| name.ends_with("dump.rdb") || name.ends_with("of-the-probe");
    assert_eq!(names.iter().find(odd), None, "{names:?}");
    comes_to_nothing(&spare, "no-such-word");
    assert!(!is_mounted(spare.pid(), "hotspare-rehearsal"));

    // The ghost that was copied is as good as ever.
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    assert_eq!(scene.get("stays").as_deref(), Some("as it was"));
    let (status, process) = rehearse(&scene, &[]);
    assert_eq!(status, 125, "there is no spare any more: {}", process.said());
}

/// What is wrong with the copy is said, and is only the copy's.
#[test]
fn a_rehearsal_that_fails_says_why() {
    let scene = scene();
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let (status, early) = rehearse(&scene, &[]);
    assert_eq!(status, 2, "{}", early.said());
    assert!(early.stderr().text().contains("no ghost yet"), "{}", early.said());
    let primary = start_redis(&scene);
    let fails = |words: &[&str], why: &str| {
        let (status, process) = rehearse(&scene, words);
        let said = process.stdout().text();
        assert_eq!(status, 1, "{}\n{}", process.said(), spare.said());
        assert!(said.contains("REHEARSAL FAILED") && said.contains(why), "{said}");
    };
    fails(&["--probe", "echo much is wrong; exit 3"], "ended with status 3");
    fails(&["--probe", "no-such-program-at-all"], "status 127");
    fails(&["--probe", "sleep 31.25", "--patience", "1s"], "did not end within 1 s");
    fails(&["--probe", "redis-cli -h $HOTSPARE_ADDRESS shutdown nosave; true"], "process 2 of");
    fails(&["--scratch", "/no/such/directory"], "/no/such/directory");
    comes_to_nothing(&spare, "31.25");
    let records = history(scene.host(1), "rehearsed");
    assert_eq!(records.len(), 5, "{records:#?}");
    assert!(records.iter().all(|record| record["passed"] == false));
    // A scratch directory on a disk is as good, and is left empty.
    let scratch = format!("{LAB_DIR}/scratch");
    fs::create_dir(scene.host(1).outside(&scratch)).unwrap();
    let (status, process) = rehearse(&scene, &["--scratch", &scratch]);
    assert_eq!(status, 0, "{}", process.said());
    assert_eq!(files(&scene.host(1).outside(&scratch)), vec![]);
    assert_eq!(primary.try_wait(), None);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    scene.serves();
}

/// A takeover does not wait for a rehearsal: clients notice neither.
#[test]
fn a_takeover_ends_a_rehearsal_at_once() {
    let scene = scene();
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = start_redis(&scene);
    let load = Held::start(&scene, (SERVICE_V4, PORT).into(), 4, 64);
    load.goes_on("before", &primary);
    let rehearsal = begin(&scene, &["--probe", "sleep 32.25; true", "--patience", "50s"]);
    await_running("32.25", &spare, &rehearsal);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    assert_eq!(rehearsal.wait(HANG).unwrap().code(), Some(2), "{}", rehearsal.said());
    assert!(rehearsal.stderr().text().contains("takes over"), "{}", rehearsal.said());
    load.goes_on("after", &spare);
    load.noticed_nothing();
    comes_to_nothing(&spare, "32.25");
    assert_eq!(history(scene.host(1), "not-rehearsed").len(), 1);
}

/// What the agent had on the stage ends with it.
#[test]
fn nothing_is_left_of_a_rehearsal_whose_agent_is_killed() {
    let scene = scene();
    let spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = start_redis(&scene);
    let rehearsal = begin(&scene, &["--probe", "sleep 33.25; true", "--patience", "50s"]);
    await_running("33.25", &spare, &rehearsal);
    spare.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    rehearsal.wait(HANG).unwrap();
    comes_to_nothing(&spare, "33.25");
    let deadline = Instant::now() + HANG;
    while scene.host(1).is_alive().unwrap() {
        assert!(Instant::now() < deadline, "something lives on host 1");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(primary.try_wait(), None);
}

/// Serves, while a child of it writes to a file without end.
const WRITER: &str = "\
import os, socket, sys, time
server = socket.create_server((sys.argv[1], 6379), family=socket.AF_INET6)
if os.fork() == 0:
    file = open(sys.argv[2], 'a')
    while True:
        file.write('x')
        file.flush()
        time.sleep(0.01)
while True:
    connection, _ = server.accept()
    connection.sendall(b'here\\n')
    connection.close()
";

/// Several processes, IPv6, nothing held back: what the copy writes to shared storage is not
/// written there.
#[test]
fn a_copy_writes_to_no_shared_storage() {
    let mut scene = scene();
    let directory = format!("{LAB_DIR}/shared");
    let file = format!("{directory}/file");
    for host in [0, 1] {
        fs::create_dir(scene.host(host).outside(&directory)).unwrap();
        fs::write(scene.host(host).outside(&file), "as it was").unwrap();
    }
    scene.engine.service_cidr = Some(format!("{SERVICE_V6}/64"));
    scene.engine.more = ["--files", &format!("shared:{directory}")].map(str::to_owned).to_vec();
    let spare = scene.engine.spare(scene.host(1)).unwrap();
    let words = ["python3", "-c", WRITER, &SERVICE_V6.to_string(), &file].map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    Engine::protected(&primary).unwrap();
    let server = (SERVICE_V6, PORT).into();
    wait_for_service(scene.lab.client(), server, HANG).unwrap();
    let ask = "import os, socket; \
               c = socket.create_connection((os.environ['HOTSPARE_ADDRESS'], 6379)); \
               assert c.recv(9) == b'here\\n'";
    let probe = format!(
        "python3 -c \"{ask}\" && before=$(wc -c < {file}) && sleep 0.2 && \
         test $(wc -c < {file}) -gt $before"
    );
    let (status, process) = rehearse(&scene, &["--json", "--probe", &probe]);
    assert_eq!(status, 0, "{}\n{}", process.said(), spare.said());
    assert_eq!(report(&process)["processes"], 2);
    let kept = fs::read_to_string(scene.host(1).outside(&file)).unwrap();
    assert_eq!(kept, "as it was", "the copy has written to the spare's storage");
    wait_for_service(scene.lab.client(), server, HANG).unwrap();
}

/// Holds a file open that is neither replicated nor shared.
const READER: &str = "import sys, time\nfile = open(sys.argv[1])\nwhile True: time.sleep(1)\n";

/// The file was there when the hosts were compared, and is gone when it is wanted: a takeover
/// would fail, and it is known before that.
#[test]
fn a_guest_whose_file_is_missing_is_found_out() {
    let mut scene = scene();
    scene.engine.more = vec![];
    scene.engine.service_cidr = None;
    let path = format!("{LAB_DIR}/settings");
    for host in [0, 1] {
        fs::write(scene.host(host).outside(&path), "the same").unwrap();
    }
    let words = ["python3", "-c", READER, &path].map(str::to_owned);
    let plan = ["--rehearse", "1s", "--for", "100ms"];
    let spare = scene.engine.spare_with(scene.host(1), &plan).unwrap();
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &words).unwrap();
    Engine::protected(&primary).unwrap();
    let told = |passed: bool, times: usize| {
        let deadline = Instant::now() + HANG;
        loop {
            let records = history(scene.host(1), "rehearsed");
            let found = records.iter().filter(|record| record["passed"] == passed);
            let found: Vec<Value> = found.cloned().collect();
            if found.len() >= times {
                return found;
            }
            assert!(Instant::now() < deadline, "{records:#?}\n{}", spare.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    // By itself, more than once.
    told(true, 2);
    fs::remove_file(scene.host(1).outside(&path)).unwrap();
    let failed = told(false, 1);
    let why = failed[0]["why"].as_str().unwrap();
    assert!(why.contains(&path), "{why}");
    assert_eq!(primary.try_wait(), None);
}
