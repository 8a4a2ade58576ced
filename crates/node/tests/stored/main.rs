//! A stored checkpoint brings a guest back, on whichever host, when nobody has it any more.

#[path = "../arbiter/places.rs"]
#[allow(dead_code, reason = "keys for etcd are not wanted here")]
mod places;

mod between;
mod elsewhere;
mod fork;
mod kills;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hotspare_torture::chain::{Scene, says};
use hotspare_torture::clock::Instant;
use hotspare_torture::lab::{Host, LAB_DIR, Lab, Process, SERVICE_CIDR};
use hotspare_torture::protected::{Engine, HANG};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use places::S3;
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
/// What is looked at is not how long it takes.
const PATIENT: [&str; 2] = ["--silence", "500ms"];
const EVERY: [&str; 4] = ["--store-every", "200ms", "--keep", "1h"];
const KEYS: usize = 300;

fn scene(hosts: usize, store: &str, more: &[&str]) -> Scene {
    let words = [&["--guest", "redis", "--store", store], &EVERY[..], &PATIENT[..], more].concat();
    let engine = Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(50),
        service_cidr: Some(SERVICE_CIDR.into()),
        replicated: vec![],
        more: words.into_iter().map(str::to_owned).collect(),
    };
    Scene { lab: Lab::new(hosts).unwrap(), engine }
}

fn directory() -> String {
    format!("file://{LAB_DIR}/store")
}

fn keys(scene: &Scene, round: usize) {
    for key in 0..KEYS {
        scene.set(&format!("key{key}"), &format!("value {key} of round {round}"));
    }
}

fn has_keys(scene: &Scene, round: usize) {
    for key in 0..KEYS {
        let expected = format!("value {key} of round {round}");
        assert_eq!(scene.get(&format!("key{key}")), Some(expected), "key{key}");
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Checkpoints in a store, as a host sees it.
fn stored(host: &Host, store: &str) -> Vec<Value> {
    let mut command = Command::new(BINARY);
    aws(&mut command);
    let told = host.run(command.args(["history", "--store", store, "--json"]), HANG);
    let told = told.unwrap_or_default();
    told.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until all that has happened by now is stored; the last checkpoint.
fn settle(scene: &Scene, host: usize, store: &str, primary: &Process) -> Value {
    let (now, deadline) = (now_ms(), Instant::now() + HANG);
    loop {
        let last = stored(scene.host(host), store).into_iter().next_back();
        match last.filter(|last| last["wall_ms"].as_u64() > Some(now)) {
            Some(last) => return last,
            None => assert!(Instant::now() < deadline, "nothing is stored:\n{}", primary.said()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Keys for S3, which moto does not look at.
fn aws(command: &mut Command) {
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
}

fn restore(scene: &Scene, host: usize, words: &[&str]) -> Process {
    let mut command = Command::new(BINARY);
    aws(&mut command);
    command.args(["restore", "--json", "--insecure"]).args(PATIENT).args(words);
    scene.host(host).spawn(&mut command).expect("start")
}

/// Waits until the guest runs; the checkpoint it runs from.
fn restored_epoch(process: &Process) -> Value {
    let told = |text: &str| serde_json::from_str::<Value>(text).ok();
    let found = process.stdout().find(HANG, |line| {
        told(&line.text)
            .filter(|told| told["event"] == "restored")
            .map(|told| told["epoch"].clone())
    });
    found.unwrap_or_else(|| panic!("it does not run:\n{}", process.said()))
}

fn kill(primary: &Process) {
    primary.signal(Signal::SIGKILL).unwrap();
    primary.wait(HANG).unwrap();
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

fn at(host: &Host, path: &str) -> PathBuf {
    host.outside(format!("{LAB_DIR}/{path}"))
}

#[test]
fn a_guest_comes_back_from_a_directory_and_is_protected_again() {
    let store = directory();
    let key = format!("{LAB_DIR}/store.key");
    let scene = scene(2, &store, &["--store-key", &key]);
    let secret = at(scene.host(0), "store.key");
    std::fs::write(&secret, "00112233".repeat(8)).unwrap();
    let primary = scene.run(&[]);
    keys(&scene, 1);
    let first = settle(&scene, 0, &store, &primary);
    keys(&scene, 2);
    let second = settle(&scene, 0, &store, &primary);
    assert_ne!(second["stands_on"], Value::Null, "it is an increment");
    kill(&primary);

    // Another host has a copy of the directory, as of a disk.
    copy(&at(scene.host(0), "store"), &at(scene.host(1), "store"));
    copy(&secret, &at(scene.host(1), "store.key"));
    let refused = scene.hotspare(1, &["inspect", &store, "redis"]).unwrap_err();
    assert!(refused.contains("--store-key"), "{refused}");
    let shown = scene.hotspare(1, &["inspect", "--store-key", &key, "--verify", &store, "redis"]);
    let shown = shown.unwrap();
    for part in ["process 2 of 1", "listens", "is as it was written", "anonymous"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let spare = scene.engine.spare_with(scene.host(0), &PATIENT).unwrap();
    let spare_at = scene.host(0).socket(7070).to_string();
    let words = ["--store-key", &key, "--store", &store, "--spare", &spare_at, &store, "redis"];
    let restored = restore(&scene, 1, &[&words[..], &EVERY].concat());
    has_keys(&scene, 2);
    // It is a primary like any other: it has a spare, and stores.
    Engine::protected(&restored).unwrap_or_else(|e| panic!("{e}\n{}", spare.said()));
    let third = settle(&scene, 1, &store, &restored);
    assert_eq!(third["reign"], 2, "{third}");
    keys(&scene, 3);
    settle(&scene, 1, &store, &restored);
    // A spare that takes over goes on storing, where it can.
    kill(&restored);
    Engine::taken_over(&spare).unwrap();
    has_keys(&scene, 3);
    let fourth = settle(&scene, 0, &store, &spare);
    assert_eq!(fourth["reign"], 2, "{fourth}");
    kill(&spare);

    // An older one, by its epoch.
    let epoch = first["epoch"].to_string();
    let words = ["--at", &epoch, "--store-key", &key, &store, "redis"];
    let back = restore(&scene, 0, &words);
    assert_eq!(restored_epoch(&back), first["epoch"]);
    has_keys(&scene, 1);
}

#[test]
fn a_guest_comes_back_from_s3_with_its_files() {
    let lab_scene = scene(3, "", &[]);
    let host = lab_scene.host(2).clone();
    let s3 = S3::start(&host);
    let store = s3.place("terms");
    let mut scene = lab_scene;
    let data = format!("{LAB_DIR}/data");
    scene.engine.more[3].clone_from(&store);
    std::fs::create_dir_all(at(scene.host(0), "data")).unwrap();
    std::fs::write(at(scene.host(0), "data/before"), "from the start").unwrap();
    let script = format!(
        "cd {data}; n=0; while :; do n=$((n+1)); echo $n > count.new; mv count.new count; \
         echo line $n >> log; sleep 0.01; done"
    );
    let guest = ["sh".to_owned(), "-c".to_owned(), script];
    let mut command = Command::new(BINARY);
    aws(&mut command);
    command.args(["run", "--json", "--insecure", "--files", &format!("replicate:{data}")]);
    command.args(&scene.engine.more).arg("--").args(guest);
    let primary = scene.host(0).spawn(&mut command).expect("start");
    let (mut last, deadline) = (Value::Null, Instant::now() + HANG);
    while last["stands_on"].is_null() {
        assert!(Instant::now() < deadline, "{}", primary.said());
        last = settle(&scene, 0, &store, &primary);
    }
    kill(&primary);
    let restored = restore(&scene, 1, &[&store, "redis"]);
    assert!(restored_epoch(&restored).as_u64() >= last["epoch"].as_u64());
    let count = || {
        let told = std::fs::read_to_string(at(scene.host(1), "data/count")).unwrap_or_default();
        told.trim().parse::<u64>().unwrap_or(0)
    };
    let before = count();
    let deadline = Instant::now() + HANG;
    while count() < before + 20 {
        assert!(Instant::now() < deadline, "it goes on: {}", restored.said());
        std::thread::sleep(Duration::from_millis(10));
    }
    kill(&restored);
    let log = std::fs::read_to_string(at(scene.host(1), "data/log")).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    for (at, line) in (1..).zip(&lines) {
        assert_eq!(*line, format!("line {at}"), "memory and files are from the same instant");
    }
    assert!(lines.len() > 20);
    let kept = std::fs::read_to_string(at(scene.host(1), "data/before")).unwrap();
    assert_eq!(kept, "from the start");
}

/// The guest does not care, everybody is told, and it goes on when there is room again.
#[test]
fn a_store_that_is_full_or_gone_is_told_and_the_guest_runs_on() {
    let store = directory();
    let scene = scene(1, &store, &["--keep-last", "3"]);
    let place = at(scene.host(0), "store");
    let inside = PathBuf::from(format!("{LAB_DIR}/store"));
    let made = inside.clone();
    scene.host(0).inside(move || {
        std::fs::create_dir(&made).unwrap();
        let size = Some("size=600k,mode=700");
        mount(Some("tmpfs"), &made, Some("tmpfs"), MsFlags::empty(), size).unwrap();
    });
    let primary = scene.run(&[]);
    says(&primary, "CHECKPOINTS ARE NOT STORED");
    let status = scene.hotspare(0, &["status"]).unwrap();
    assert!(status.contains("NOT STORED at this time"), "{status}");
    keys(&scene, 1);
    has_keys(&scene, 1);
    let unmounted = inside.clone();
    scene.host(0).inside(move || umount2(&unmounted, MntFlags::MNT_DETACH).unwrap());
    settle(&scene, 0, &store, &primary);
    says(&primary, "is stored");
    // All of it is taken away: the next one is whole.
    std::fs::remove_dir_all(place.join("redis")).unwrap();
    keys(&scene, 2);
    let last = settle(&scene, 0, &store, &primary);
    kill(&primary);
    let back = restore(&scene, 0, &[&store, "redis"]);
    assert!(restored_epoch(&back).as_u64() >= last["epoch"].as_u64());
    has_keys(&scene, 2);
    let history = scene.hotspare(0, &["history"]).unwrap();
    for part in ["CHECKPOINTS ARE NOT STORED", "checkpoints are stored", "RESTORED here"] {
        assert!(history.contains(part), "{part}: {history}");
    }
}

#[test]
fn a_host_that_differs_is_refused_with_each_difference() {
    let store = directory();
    let scene = scene(2, &store, &[]);
    let program = at(scene.host(0), "program");
    for host in [0, 1] {
        copy(Path::new("/bin/sleep"), &at(scene.host(host), "program"));
    }
    let mut engine = scene.engine.clone();
    engine.service_cidr = None;
    let guest = [format!("{LAB_DIR}/program"), "1000".to_owned()];
    let primary = engine.run(scene.host(0), &[], &guest).unwrap();
    settle(&scene, 0, &store, &primary);
    kill(&primary);
    copy(&at(scene.host(0), "store"), &at(scene.host(1), "store"));
    let mut other = std::fs::read(&program).unwrap();
    other.extend(b"x");
    std::fs::write(at(scene.host(1), "program"), other).unwrap();
    let refused = scene.hotspare(1, &["restore", "--insecure", &store, "redis"]).unwrap_err();
    let said = refused.contains("cannot go on with the guest") && refused.contains("program");
    assert!(said, "{refused}");
    let refused = scene.hotspare(1, &["restore", "--insecure", &store, "memcached"]).unwrap_err();
    assert!(refused.contains("it has some of redis"), "{refused}");

    // A flipped bit is found, and named.
    let packs = at(scene.host(0), "store/redis/packs");
    let mut packs: Vec<_> = std::fs::read_dir(packs).unwrap().flatten().map(|e| e.path()).collect();
    packs.sort();
    let mut bytes = std::fs::read(&packs[0]).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&packs[0], bytes).unwrap();
    let name = packs[0].file_name().unwrap().to_string_lossy().into_owned();
    let refused = scene.hotspare(0, &["restore", "--insecure", &store, "redis"]).unwrap_err();
    assert!(refused.contains(&name) && refused.contains("damaged at byte"), "{refused}");
}

/// A Python program that fills `mib` MiB with the number of the round, in pieces with pauses of
/// `pause_s`, and looks at what the round before has left there: memory of which some is of another
/// checkpoint is found.
fn checker(mib: u32, pause_s: f64) -> String {
    CHECKER.replace("MIB", &mib.to_string()).replace("PAUSE_S", &pause_s.to_string())
}

const CHECKER: &str = r#"
import mmap, os, sys, time
# A line at once: the agent writes its own in between, and print() may write in pieces.
say = lambda line: os.write(1, line.encode() + b'\n')
SIZE, CHUNK = MIB << 20, MIB << 15
memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = lambda round: b'%08d' % round * (CHUNK // 8)
memory[:] = block(0) * (SIZE // CHUNK)
old, number = block(0), 0
while True:
    number += 1
    new = block(number)
    for at in range(0, SIZE, CHUNK):
        if memory[at:at + CHUNK] != old:
            say(f'WRONG in round {number} at {at}')
            sys.exit(3)
        memory[at:at + CHUNK] = new
        if PAUSE_S:
            time.sleep(PAUSE_S)
    old = new
    if PAUSE_S or number % 10 == 0:
        say(f'fine {number}')
"#;

/// What is sent while it is held back counts for the store as well; and its memory is the same
/// whether it comes behind the guest or before it runs.
#[test]
fn a_guest_that_writes_faster_than_it_is_copied_comes_back_as_it_was() {
    let store = directory();
    let mut scene = scene(1, &store, &[]);
    scene.engine.service_cidr = None;
    scene.engine.more[1] = "checker".into();
    let words = ["python3", "-c", &checker(64, 0.0)].map(str::to_owned);
    let primary = scene.engine.run(scene.host(0), &[], &words).unwrap();
    says(&primary, "the guest writes faster than its memory can be copied");
    let mut epochs: Vec<Value> = Vec::new();
    for _ in 0..3 {
        epochs.push(settle(&scene, 0, &store, &primary)["epoch"].clone());
    }
    kill(&primary);
    for (epoch, first) in
        epochs.into_iter().flat_map(|epoch| [(epoch.clone(), false), (epoch, true)])
    {
        let at = epoch.to_string();
        let words = ["--load-first", "--at", &at, &store, "checker"];
        let restored = restore(&scene, 0, &words[usize::from(!first)..]);
        restored_epoch(&restored);
        let mut rounds = 0;
        let looked = restored.stdout().find(HANG, |line| {
            assert!(!line.text.contains("WRONG"), "of epoch {epoch}: {}", line.text);
            rounds += usize::from(line.text.contains("fine"));
            (rounds >= 3).then_some(())
        });
        assert!(looked.is_some(), "it does not go on:\n{}", restored.said());
        assert!(!first || restored.said().contains(" 0 B came behind it"), "{}", restored.said());
        kill(&restored);
    }
}
