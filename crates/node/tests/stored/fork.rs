//! Copies of a guest from its store, beside the one that lives: each has an address of its own.

use std::net::{Ipv4Addr, SocketAddr};

use hotspare_torture::chain::Scene;
use hotspare_torture::clients::{Connection, Protocol};
use hotspare_torture::protected::HANG;

use super::{
    KEYS, at, copy, directory, has_keys, keys, kill, restore, restored_epoch, scene, settle, stored,
};

/// Where the Redis listens.
pub const PORT: u16 = 6379;

/// A client of whichever copy.
pub fn connect(scene: &Scene, server: SocketAddr) -> Connection {
    let open = move || Connection::open_when_it_listens(server, HANG);
    scene.lab.client().inside(open).expect("it serves")
}

pub fn get(connection: &mut Connection, key: &str) -> Option<String> {
    let mut request = Vec::new();
    Protocol::Redis.put_get(&mut request, key);
    connection.send(&request).unwrap();
    Protocol::Redis.take_get(connection).unwrap()
}

fn set(connection: &mut Connection, key: &str, value: &str) {
    let mut request = Vec::new();
    Protocol::Redis.put_set(&mut request, key, value);
    connection.send(&request).unwrap();
    Protocol::Redis.take_set(connection).unwrap();
}

#[test]
fn copies_of_a_guest_serve_beside_it_and_none_hears_of_another() {
    let store = directory();
    let scene = scene(2, &store, &[]);
    let live = scene.run(&[]);
    keys(&scene, 1);
    let first = settle(&scene, 0, &store, &live);
    let epoch = first["epoch"].to_string();
    copy(&at(scene.host(0), "store"), &at(scene.host(1), "store"));

    let mut copies = Vec::new();
    for (host, last) in [(0, 51), (1, 52)] {
        let cidr = format!("10.77.0.{last}/24");
        let name = format!("copy{last}");
        let own = ["--service-address", &cidr, "--rename", &name, "--at", &epoch];
        let process = restore(&scene, host, &[&own[..], &[&store, "redis"]].concat());
        assert_eq!(restored_epoch(&process), first["epoch"]);
        assert!(!process.said().contains("answers on this network"), "{}", process.said());
        let server = SocketAddr::from((Ipv4Addr::new(10, 77, 0, last), PORT));
        let mut client = connect(&scene, server);
        set(&mut client, "whose", &name);
        copies.push((process, client, name));
    }
    // All three live on, each for itself.
    scene.set("whose", "the first");
    keys(&scene, 2);
    for (process, client, name) in &mut copies {
        for key in 0..KEYS {
            let expected = format!("value {key} of round 1");
            let found = get(client, &format!("key{key}"));
            assert_eq!(found, Some(expected), "key{key} of {name}:\n{}", process.said());
        }
        assert_eq!(get(client, "whose"), Some(name.clone()));
    }
    has_keys(&scene, 2);
    assert_eq!(scene.get("whose"), Some("the first".into()));
    // Who only tries something writes nothing where the first one's checkpoints are.
    settle(&scene, 0, &store, &live);
    let reigns = stored(scene.host(0), &store).into_iter().map(|one| one["reign"].clone());
    assert!(reigns.clone().count() > 1 && reigns.into_iter().all(|reign| reign == 1));
    for (process, ..) in &copies {
        kill(process);
    }
    keys(&scene, 3);
    has_keys(&scene, 3);
}
