//! `docs/formats/store.md` and the code say the same.

use hotspare_image::memory::{MmId, PageOwner};
use hotspare_image::{Epoch, Position, Term};
use hotspare_store::{About, Host, Manifest};

const PAGE: &str = include_str!("../../../docs/formats/store.md");

/// BLAKE3 of the page's tables, its first 8 bytes. When this changes, either the format did (then
/// the version must), or only the words: read the tables again with the code beside them.
const TABLES_HASH: &str = "b7c90f988cd6bac3";
/// The same of a manifest that has everything.
const MANIFEST_HASH: &str = "396a127cf1684dff";

fn short(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_owned()
}

#[test]
fn the_tables_are_those_that_the_code_was_written_to() {
    let tables: String =
        PAGE.lines().filter(|line| line.starts_with('|')).flat_map(|line| [line, "\n"]).collect();
    assert_eq!(short(tables.as_bytes()), TABLES_HASH, "docs/formats/store.md");
}

#[test]
fn a_manifest_has_the_bytes_that_it_always_had() {
    let about = About {
        guest: "redis".into(),
        position: Position::checkpoint(Epoch(9)),
        term: Term(2),
        time_ms: 1_795_372_205_000,
        settings: vec![("guest".into(), "redis".into())],
        host: Host {
            kernel: "6.18".into(),
            features: vec!["avx2".into()],
            others: vec![("page".into(), "4096".into())],
        },
        files: Vec::new(),
    };
    let manifest = Manifest {
        about,
        reign: 3,
        base: Some(7),
        owners: vec![PageOwner::Mm(MmId(1))],
        attempt: 4,
        ..Manifest::default()
    };
    let bytes = minicbor::to_vec(&manifest).expect("writes to memory");
    assert_eq!(short(&bytes), MANIFEST_HASH);
    let read: Manifest = minicbor::decode(&bytes).expect("reads");
    assert_eq!(read, manifest);
    let sealed = manifest.seal("a/checkpoints/b", None).expect("seals");
    assert_eq!(&sealed[..8], b"HSst\x01\x00\x00\x00");
    assert_eq!(sealed[8..16], (bytes.len() as u64).to_le_bytes());
    let (body, digest) = sealed.split_at(sealed.len() - 32);
    assert_eq!(blake3::hash(body).as_bytes(), digest);
}
