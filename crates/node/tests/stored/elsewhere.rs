//! Memory of a stored guest that comes from elsewhere than its store.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;

use hotspare_torture::chain::Scene;
use hotspare_torture::lab::LAB_DIR;
use hotspare_torture::protected::HANG;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::fork::{PORT, connect, get};
use super::{
    BINARY, KEYS, at, copy, directory, has_keys, keys, kill, restore, restored_epoch, scene, settle,
};

const CERTIFICATES: &str = "/srv/hotspare-lab/keys";
const CONTROL: u16 = 7099;

/// One byte of each pack is another.
fn hurt(packs: &Path) {
    for pack in std::fs::read_dir(packs).unwrap().flatten() {
        let mut bytes = std::fs::read(pack.path()).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(pack.path(), bytes).unwrap();
    }
}

#[test]
fn what_the_store_has_lost_comes_from_a_copy_of_it() {
    let store = directory();
    let scene = scene(2, &store, &[]);
    let primary = scene.run(&[]);
    keys(&scene, 1);
    let last = settle(&scene, 0, &store, &primary);
    kill(&primary);
    let whole = at(scene.host(0), "store");
    let (theirs, other) = (at(scene.host(1), "store"), at(scene.host(1), "copy"));
    copy(&whole, &theirs);
    copy(&whole, &other);
    let packs = theirs.join("redis/packs");
    std::fs::remove_dir_all(&packs).unwrap();
    let refused = scene.hotspare(1, &["restore", "--insecure", &store, "redis"]).unwrap_err();
    assert!(refused.contains("is missing from the store"), "{refused}");
    let elsewhere = format!("file://{LAB_DIR}/copy");
    let words = ["--pages", &elsewhere, &store, "redis"];
    let back = restore(&scene, 1, &words);
    assert!(restored_epoch(&back).as_u64() >= last["epoch"].as_u64());
    has_keys(&scene, 1);
    kill(&back);

    // A copy that is damaged is not believed, and the store is asked.
    copy(&whole.join("redis/packs"), &packs);
    hurt(&other.join("redis/packs"));
    let back = restore(&scene, 1, &words);
    restored_epoch(&back);
    has_keys(&scene, 1);
    assert!(back.said().contains("pages are asked of others"), "{}", back.said());
    kill(&back);
    hurt(&packs);
    let both = ["restore", "--insecure", "--pages", &elsewhere, &store, "redis"];
    let refused = scene.hotspare(1, &both).unwrap_err();
    assert!(refused.contains("damaged at byte"), "{refused}");
}

/// A guest whose agent keeps what it stores, and another host that may ask for it.
fn kept_in_memory(store: &str) -> Scene {
    let mut scene = scene(2, store, &[]);
    let names = ["keys", CERTIFICATES, "alpha", "beta"];
    scene.host(0).run(Command::new(BINARY).args(names), HANG).unwrap();
    copy(&scene.host(0).outside(CERTIFICATES), &scene.host(1).outside(CERTIFICATES));
    let control = scene.host(0).socket(CONTROL).to_string();
    let more = ["--page-memory", "1G", "--control", &control, "--keys", CERTIFICATES, "--name"];
    scene.engine.more.extend(more.map(str::to_owned));
    scene.engine.more.push("alpha".to_owned());
    scene
}

#[test]
fn an_agent_gives_what_it_has_in_memory_and_is_not_missed_when_it_hangs() {
    let store = directory();
    let scene = kept_in_memory(&store);
    let live = scene.run(&[]);
    keys(&scene, 1);
    let first = settle(&scene, 0, &store, &live);
    let epoch = first["epoch"].to_string();
    let (whole, theirs) = (at(scene.host(0), "store"), at(scene.host(1), "store"));
    copy(&whole, &theirs);
    let packs = theirs.join("redis/packs");
    std::fs::remove_dir_all(&packs).unwrap();
    let agent = scene.host(0).socket(CONTROL).to_string();
    let stranger = ["restore", "--insecure", "--pages", &agent, &store, "redis"];
    let refused = scene.hotspare(1, &stranger).unwrap_err();
    assert!(refused.contains("give --keys"), "{refused}");

    let fork = |last: u8| {
        let (cidr, name) = (format!("10.77.0.{last}/24"), format!("copy{last}"));
        let own = ["--service-address", &cidr, "--rename", &name, "--at", &epoch];
        let from = ["--pages", &agent, "--keys", CERTIFICATES, "--name", "beta", &store, "redis"];
        let process = restore(&scene, 1, &[&own[..], &from].concat());
        assert_eq!(restored_epoch(&process), first["epoch"]);
        let server = SocketAddr::from((Ipv4Addr::new(10, 77, 0, last), PORT));
        let mut client = connect(&scene, server);
        for key in 0..KEYS {
            let expected = Some(format!("value {key} of round 1"));
            assert_eq!(get(&mut client, &format!("key{key}")), expected, "{}", process.said());
        }
        process
    };
    let forked = fork(51);
    let told = |text: &str| serde_json::from_str::<Value>(text).ok();
    let loaded = |text: &str| told(text).is_some_and(|told| told["event"] == "loaded");
    let is_loaded = forked.stdout().find(HANG, |line| loaded(&line.text).then_some(()));
    is_loaded.unwrap_or_else(|| panic!("its memory comes: {}", forked.said()));

    // An agent that hangs gives nothing: then the store is asked.
    copy(&whole.join("redis/packs"), &packs);
    live.signal(Signal::SIGSTOP).unwrap();
    let again = fork(52);
    assert!(again.said().contains("pages are asked of others"), "{}", again.said());
    live.signal(Signal::SIGCONT).unwrap();
    has_keys(&scene, 1);
    for process in [&forked, &again, &live] {
        kill(process);
    }
}
