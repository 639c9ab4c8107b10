"""Which addresses a message may go to: every vector of service_anchors §7.2 and §6.9."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.network.addresses import Network, refusal, refused

ANYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))

REFUSED = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("::1", "169.254.169.254", "0.0.0.0", "0.1.2.3", "fd00::1", "fc00::1", "fe80::1", "fec0::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "198.18.0.1", "198.19.0.1"),
    *("100.64.0.1", "100.127.255.255", "224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"),
    *("240.0.0.1", "255.255.255.255", "192.0.0.1", "192.0.2.1", "203.0.113.9", "2001:db8::1"),
    *(
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "64:ff9a::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
    ),
    *("::ffff:0:127.0.0.1", "::ffff:0:a9fe:a9fe", "::ffff:0:8.8.8.8", "4000::1", "8000::1"),
    *("5f00::1", "3fff::1", "3fff:fff::1", "100:0:0:1::1", "100::1", "200::1", "1fff::1"),
    *("::127.0.0.1", "::", "::8.8.8.8", "::ffff:8.8.8.8", "2001:0:7f00:1::1", "fd00:ec2::254"),
    *(
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fe80::1%eth0",
        "127.1",
        "2130706433",
        "x",
    ),
]
PUBLIC = [
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.32.0.1"),
    *("2001:4860:4860::8888", "3fff:1000::1"),
    *("2606:4700:4700::1111", "2a00:1450::1", "64:ff9b::808:808", "2002:808:808::1"),
]


@pytest.mark.parametrize("address", REFUSED)
def test_private_addresses_are_refused(address: str) -> None:
    """Catches B28 and what is_private alone or is_global alone lets through."""
    assert refusal(address) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    """Catches a guard that refuses real receivers."""
    assert refusal(address) is None


@pytest.mark.parametrize(
    ("address", "networks", "allowed"),
    [
        pytest.param("192.168.1.5", ["192.168.1.0/24"], True, id="listed"),
        pytest.param("192.168.2.5", ["192.168.1.0/24"], False, id="beside-it"),
        pytest.param("127.0.0.1", ["127.0.0.0/8"], True, id="loopback-listed"),
        pytest.param("::1", ["::1/128"], True, id="v6-loopback-listed"),
        pytest.param("169.254.169.254", ["0.0.0.0/0"], False, id="metadata-in-everything"),
        pytest.param("169.254.169.254", ["169.254.0.0/16"], False, id="metadata-in-link-local"),
        pytest.param("169.254.169.254", ["169.254.169.254/32"], True, id="metadata-itself"),
        pytest.param("fd00:ec2::254", ["fd00::/8"], False, id="v6-metadata-in-ula"),
        pytest.param("fd00:ec2::254", ["fd00:ec2::254/128"], True, id="v6-metadata-itself"),
        pytest.param("fe80::1", ["fe80::/10"], False, id="link-local"),
        pytest.param("::ffff:127.0.0.1", ["127.0.0.0/8"], False, id="mapped-needs-both"),
        pytest.param("64:ff9b::7f00:1", ["64:ff9b::/96"], False, id="nat64-inner-still-judged"),
        pytest.param("::ffff:0:7f00:1", ["::/0"], False, id="translated-needs-both"),
        pytest.param("4000::1", ["4000::/16"], True, id="not-given-out-but-listed"),
        pytest.param("5f00::1", ["5f00::/16"], True, id="segment-routing-listed"),
        pytest.param("224.0.0.1", ["0.0.0.0/0"], False, id="multicast-never"),
        pytest.param("0.0.0.0", ["0.0.0.0/0"], False, id="unspecified-never"),
        pytest.param("100.64.0.1", ["100.64.0.0/10"], True, id="carrier-nat-listed"),
    ],
)
def test_allow_list(address: str, networks: list[str], allowed: bool) -> None:
    """Catches VibeNVR#204: an allow-list that opens the metadata service."""
    listed: list[Network] = [ipaddress.ip_network(network) for network in networks]
    assert (refusal(address, listed) is None) is allowed


@pytest.mark.parametrize(
    ("addresses", "allowed"),
    [
        pytest.param(["8.8.8.8"], True, id="public"),
        pytest.param(["8.8.8.8", "::1"], False, id="public-A-private-AAAA"),
        pytest.param(["127.0.0.1", "8.8.8.8"], False, id="private-first"),
        pytest.param([], False, id="none"),
    ],
)
def test_one_bad_address_refuses_the_host(addresses: list[str], allowed: bool) -> None:
    """Catches a guard that looks at the first address and connects to the second."""
    assert (refused(addresses) is None) is allowed


@given(st.ip_addresses(v=4))
def test_hidden_ipv4_is_never_easier(inner: ipaddress.IPv4Address) -> None:
    """Law: an address wrapped in IPv6 is refused whenever it is refused bare."""
    if refusal(str(inner)) is None:
        return
    number = int(inner)
    wrapped = [
        (0x64FF9B << 96) | number,
        (0xFFFF << 32) | number,
        (0xFFFF << 48) | number,
        (0x2002 << 112) | (number << 80),
        (0x20010000 << 96) | (number << 64),
    ]
    for value in wrapped:
        assert refusal(str(ipaddress.IPv6Address(value))) is not None


@given(st.ip_addresses(v=6))
def test_only_what_is_given_out_passes(address: ipaddress.IPv6Address) -> None:
    """Law: an IPv6 address outside 2000::/3 passes by NAT64 alone; later kernels may route it."""
    if refusal(str(address)) is None:
        nat64 = int(address) >> 32 == 0x64FF9B << 64
        assert nat64 or int(address) >> 125 == 1


@given(st.ip_addresses())
def test_link_local_and_multicast_never_pass(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    """Law: allowing everything still allows neither."""
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        assert refusal(str(address), ANYWHERE) is not None
