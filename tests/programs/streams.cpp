// std::ofstream writes its descriptor itself: small and large pieces, seeks, a second stream.
// usage: streams DIR
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    std::string dir = argv[1];
    std::vector<char> big(3000000);
    for (size_t i = 0; i < big.size(); i++) big[i] = static_cast<char>(i * 31 + i / 4096);
    std::ofstream out(dir + "/stream", std::ios::binary);
    for (int i = 0; i < 20000; i++) out << "line " << i << '\n';
    out.write(big.data(), static_cast<std::streamsize>(big.size()));
    std::cout << out.tellp() << '\n';
    out.seekp(100);
    out << "[changed]";
    out.seekp(0, std::ios::end);
    out << "end\n";
    out.flush();
    std::ifstream in(dir + "/stream", std::ios::binary);
    std::vector<char> back(big.size());
    in.seekg(-static_cast<std::streamoff>(big.size()) - 4, std::ios::end);
    in.read(back.data(), static_cast<std::streamsize>(back.size()));
    std::cout << (back == big ? "same" : "different") << '\n';
    out << "more after it was read\n";
    out.close();
    std::fstream both(dir + "/both", std::ios::in | std::ios::out | std::ios::trunc);
    for (int i = 0; i < 1000; i++) both << i << ' ';
    both.seekg(0);
    int sum = 0, value;
    while (both >> value) sum += value;
    both.clear();
    both.seekp(0, std::ios::end);
    both << "sum " << sum;
    std::ofstream append(dir + "/both", std::ios::app);
    both.close();
    append << " appended";
    append.close();
    std::cout << (out && in && append ? "good" : "bad") << '\n';
}
